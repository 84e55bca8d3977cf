"""A record's line in words that need no key: "batch 4, 8 heads, 4096 tokens, head dim 64, causal"."""

from __future__ import annotations

from typing import Any

from tilewise.bench.lines import Line
from tilewise.bench.operations.operation import words

_KINDS = {
    "gelu": "GELU",
    "swiglu": "SwiGLU",
    "rms": "RMSNorm",
    "layer": "LayerNorm",
    "residual": "addition and RMSNorm",
}

_MASKED = {
    "sinks": "sinks",
    "softcap": "softcap",
    "alibi": "ALiBi",
    "documents": "documents",
    "neighbourhood": "2-D neighbourhoods",
    "pair-bias": "a pair bias",
}


def type_of(line: Line) -> str:
    """The type, with TF32 apart: f32 numbers whose products may have TF32's digits.

    >>> type_of({"dtype": "f32"}), type_of({"dtype": "f32", "tf32": True})
    ('f32', 'tf32')
    """
    return "tf32" if line.get("tf32") and line["dtype"] == "f32" else line["dtype"]


def type_words(name: str) -> str:
    """
    >>> type_words("bf16"), type_words("tf32")
    ('bf16', 'TF32')
    """
    return "TF32" if name == "tf32" else name


def problem_words(line: Line) -> str:
    """What is computed, without type and pass.

    >>> sizes = {"b": 2, "hq": 32, "hkv": 8, "sq": 1, "sk": 4096, "d": 128, "dv": 128}
    >>> problem_words({**sizes, "op": "attention", "causal": False, "features": "window=256"})
    'batch 2, 32 heads over 8, 1 query, 4096 keys, head dim 128, window of 256'
    >>> problem_words({"op": "gemm", "sizes": {"m": 1, "n": 2, "k": 3}, "causal": False})
    'matrix product, 1 × 2 × 3'
    """
    parts = _operation(line["op"], line["sizes"]) if "sizes" in line else _attention(line)
    parts += [_feature(word) for word in str(line.get("features") or "").split()]
    return ", ".join(parts + (["causal"] if line["causal"] else []))


def line_words(line: Line) -> str:
    """The problem, its type and pass."""
    return f"{problem_words(line)}; {type_words(type_of(line))} {line['pass']}"


def _attention(line: Line) -> list[str]:
    heads = f"{line['hq']} {'head' if line['hq'] == 1 else 'heads'}"
    heads += f" over {line['hkv']}" if line["hq"] != line["hkv"] else ""
    length = [_counted(line["sq"], "token")]
    if line["sq"] != line["sk"]:
        queries = "1 query" if line["sq"] == 1 else f"{line['sq']} queries"
        length = [queries, _counted(line["sk"], "key")]
    dims = [f"head dim {line['d']}"] + ([f"of values {line['dv']}"] if line["dv"] != line["d"] else [])
    return [f"batch {line['b']}", heads, *length, *dims]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _operation(op: str, sizes: dict[str, Any]) -> list[str]:
    """Its sizes by their names; as the record has them where they are not those of the operation."""
    kind = _KINDS.get(str(sizes.get("kind")), str(sizes.get("kind")))
    try:
        return {
            "gemm": lambda: ["matrix product", f"{sizes['m']} × {sizes['n']} × {sizes['k']}"],
            "ffn": lambda: [
                f"feed-forward {kind}",
                f"{sizes['tokens']} tokens",
                f"{sizes['embed']} wide, {sizes['hidden']} hidden",
            ],
            "norm": lambda: [kind, f"{sizes['rows']} rows of {sizes['dim']}"],
            "rope": lambda: [
                "rotary embedding",
                f"{sizes['heads']} heads",
                f"{sizes['length']} tokens",
                f"head dim {sizes['dim']}",
            ],
            "layer": lambda: [
                f"layer of {sizes['model']}",
                f"batch {sizes['batch']}",
                f"{sizes['tokens']} tokens",
            ],
            "masked-attention": lambda: [
                f"attention with {_MASKED[sizes['kind']]}",
                f"batch {sizes['batch']}",
                f"{sizes['heads']} heads",
                f"{sizes['length']} tokens",
                f"head dim {sizes['dim']}",
            ],
            "decode-step": lambda: [
                f"decode step of {sizes['model']}",
                f"batch {sizes['batch']}",
                f"{sizes['context']} tokens before",
            ],
        }[op]()
    except KeyError:
        return [words(op, sizes)]


def _feature(word: str) -> str:
    name, _, value = word.partition("=")
    try:
        if name == "blocks":
            return f"{100 * float(value):g} % of the blocks"
    except ValueError:
        return word
    return {
        "mask": f"{value} mask",
        "window": f"window of {value}",
        "dropout": f"dropout {value}",
        "deterministic": "deterministic",
    }.get(name, word)
