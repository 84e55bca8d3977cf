"""Odd calls of every public function end in an exception that names an argument, and in nothing worse.

Each argument of each function is given each of some two dozen odd values, and every result is either computed
or refused by name: no crash, no hang, no exception of somebody else's.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tilewise
import torch
from tilewise import BlockMask, masks, nn
from tilewise.integrations import flash_attn, onnx, transformers, vit_pytorch
from torch import Tensor


class Odd:
    pass


ODD: dict[str, Any] = {
    "None": None,
    "text": "x",
    "bytes": b"simd",
    "2": 2,
    "-1": -1,
    "2^63": 2**63,
    "no float holds it": 10**400,
    "no text holds it": 10**5000,
    "1.5": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "True": True,
    "list": [1],
    "tuple": (1, 2, 3),
    "dict": {},
    "object": Odd(),
    "class": Odd,
    "complex": 1j,
    "dtype": torch.float32,
    "NumPy's float": np.float32(0.5),
    "array": np.array([1.0, 2.0]),
    "int tensor": torch.tensor(2),
    "vector": torch.zeros(3),
    "matrix": torch.zeros(2, 2),
    "nothing": torch.zeros(0),
    "complex tensor": torch.zeros(2, dtype=torch.complex64),
    "sparse": torch.eye(5).to_sparse(),
    "meta": torch.zeros(5, 7, device="meta"),
    "quantized": torch.quantize_per_tensor(torch.zeros(2, 4, 5, 8), 0.1, 0, torch.qint8),
    "jagged": torch.nested.nested_tensor([torch.zeros(3, 8), torch.zeros(5, 8)], layout=torch.jagged),
}


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def keys_up_to(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def with_blocks(**fields: Any) -> Tensor:
    mask = BlockMask.from_dense(torch.ones(1, 1, 5, 7, dtype=torch.bool).tril(), block_size=4)
    return tilewise.attention(
        *(zeros(2, 4, n, 8) for n in (5, 7, 7)), block_mask=dataclasses.replace(mask, **fields)
    )


Q, K, PACKED, ROWS, TOKENS = (
    zeros(2, 4, 5, 8),
    zeros(2, 4, 7, 8),
    zeros(9, 4, 8),
    zeros(3, 8),
    zeros(2, 3, 32),
)
QF, KF = Q.transpose(1, 2), K.transpose(1, 2)
CU, COS = ints(0, 4, 9), zeros(16, 4)
DENSE = {"query": Q, "key": K, "value": K}
LENGTHS = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 5, "max_seqlen_k": 5}
SMALL = nn.LayerConfig(embed_dim=32, num_heads=4, ffn_dim=16)
LAYER = nn.TransformerLayer(SMALL)

# The functions with arguments that are sound. All others they have are tried out, too.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "attention": (tilewise.attention, DENSE),
    "scaled_dot_product_attention": (tilewise.scaled_dot_product_attention, DENSE),
    "explain": (tilewise.explain, DENSE),
    "attention_varlen": (
        tilewise.attention_varlen,
        {"query": PACKED, "key": PACKED, "value": PACKED} | LENGTHS,
    ),
    "attention_decode": (
        tilewise.attention_decode,
        {"query": Q[:, :, :1], "k_cache": K, "v_cache": K, "cache_seqlens": ints(3, 7)},
    ),
    "merge_states": (tilewise.merge_states, {"outs": [Q, Q], "lses": [Q[..., 0], Q[..., 0]]}),
    "linear": (tilewise.linear, {"input": ROWS, "weight": zeros(6, 8)}),
    "ffn": (tilewise.ffn, {"x": ROWS, "up": zeros(16, 8), "down": zeros(8, 16)}),
    "rms_norm": (tilewise.rms_norm, {"input": ROWS, "weight": zeros(8)}),
    "layer_norm": (tilewise.layer_norm, {"input": ROWS, "weight": zeros(8)}),
    "rope_tables": (tilewise.rope_tables, {"positions": 4, "rotary_dim": 8}),
    "apply_rope": (tilewise.apply_rope, {"query": Q, "key": Q, "cos": COS, "sin": COS}),
    "rope_into_cache": (
        tilewise.rope_into_cache,
        {"query": Q, "key": Q, "value": Q, "cos": COS, "sin": COS}
        | {"k_cache": zeros(2, 4, 16, 8), "v_cache": zeros(2, 4, 16, 8)},
    ),
    "BlockMask": (with_blocks, {}),
    "BlockMask.from_dense": (BlockMask.from_dense, {"mask": torch.ones(1, 1, 8, 8, dtype=torch.bool)}),
    "BlockMask.from_mask_mod": (
        BlockMask.from_mask_mod,
        {"mask_mod": keys_up_to, "length_q": 8, "length_k": 8},
    ),
    "masks.documents": (masks.documents, {"lengths": [3, 5]}),
    "masks.prefix": (masks.prefix, {"length": 8, "prefix": 3}),
    "masks.shared_prompt": (masks.shared_prompt, {"prompt": 3, "responses": [2, 3]}),
    "masks.block_causal": (masks.block_causal, {"length": 8, "block": 3}),
    "masks.neighbourhood": (masks.neighbourhood, {"extents": (3, 4), "kernel": (2, 3)}),
    "nn.Attention": (nn.Attention, {"embed_dim": 32, "num_heads": 4}),
    "nn.RMSNorm": (nn.RMSNorm, {"dim": 8}),
    "nn.LayerNorm": (nn.LayerNorm, {"dim": 8}),
    "nn.FeedForward": (nn.FeedForward, {"embed_dim": 8, "ffn_dim": 16}),
    "nn.GatedFeedForward": (nn.GatedFeedForward, {"embed_dim": 8, "ffn_dim": 16}),
    "nn.RotaryEmbedding": (nn.RotaryEmbedding, {"head_dim": 8, "max_positions": 16}),
    "nn.LayerConfig": (nn.LayerConfig, {"embed_dim": 32, "num_heads": 4, "ffn_dim": 16}),
    "nn.TransformerLayer": (nn.TransformerLayer, {"config": SMALL}),
    "a TransformerLayer": (LAYER.forward, {"x": TOKENS}),
    "its cache": (LAYER.make_cache, {"batch": 2, "capacity": 4}),
    "an Attention": (nn.Attention(32, 4).forward, {"x": TOKENS}),
    "a MultiheadAttention": (
        nn.MultiheadAttention(32, 4, batch_first=True).forward,
        {"query": TOKENS, "key": TOKENS, "value": TOKENS},
    ),
    "flash_attn_func": (flash_attn.flash_attn_func, {"q": QF, "k": KF, "v": KF}),
    "flash_attn_qkvpacked_func": (flash_attn.flash_attn_qkvpacked_func, {"qkv": zeros(2, 5, 3, 4, 8)}),
    "flash_attn_varlen_func": (
        flash_attn.flash_attn_varlen_func,
        {"q": PACKED, "k": PACKED, "v": PACKED} | LENGTHS,
    ),
    "flash_attn_with_kvcache": (
        flash_attn.flash_attn_with_kvcache,
        {"q": zeros(2, 1, 4, 8), "k": zeros(2, 1, 2, 8), "v": zeros(2, 1, 2, 8), "cache_seqlens": 3}
        | {"k_cache": zeros(2, 16, 2, 8), "v_cache": zeros(2, 16, 2, 8)}
        | {"rotary_cos": COS, "rotary_sin": COS},
    ),
    "onnx.export": (onnx.export, {"model": LAYER, "args": (TOKENS,), "opset_version": 23}),
    "transformers.register": (transformers.register, {"name": "tilewise"}),
    "vit_pytorch.switch": (vit_pytorch.switch, {"model": LAYER}),
}
# Arguments that are torch's business, or that torch would work on for long.
TORCHS = {"device", "dtype", "changes", "num_splits"}
ONLY = {"onnx.export": {"opset_version"}}


def arguments_of(name: str) -> list[str]:
    call, sound = CALLS[name]
    if name == "BlockMask":
        return [field.name for field in dataclasses.fields(BlockMask)]
    found = [x for x in inspect.signature(call).parameters if x not in TORCHS]
    return [x for x in found if x in ONLY.get(name, found)] or list(sound)


def odd_calls(name: str) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    call, sound = CALLS[name]
    for argument in arguments_of(name):
        for kind, value in ODD.items():
            if name == "transformers.register" and isinstance(value, str):
                continue  # a sound name, which would be known from here on
            yield argument, kind, lambda argument=argument, value=value: call(**(sound | {argument: value}))


@pytest.mark.parametrize("name", CALLS)
def test_an_odd_argument_is_taken_or_refused_by_name(name: str) -> None:
    call, _ = CALLS[name]
    known = {*arguments_of(name), *(inspect.signature(call).parameters if name != "BlockMask" else ())}
    wrong = []
    for argument, kind, attempt in odd_calls(name):
        try:
            attempt()
        except (tilewise.Error, TypeError) as error:
            said = re.split(r"[:\[. ]", str(error))[0]
            inside = said == "block_mask" or argument in str(error)
            if said not in known and not inside and "not meta or fake" not in str(error):
                wrong.append(f"{argument}={kind}: {type(error).__name__}: {error}")
        except Exception as error:
            wrong.append(f"{argument}={kind}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


# What each kind of argument never is, whatever function has it.
NEVER: dict[str, tuple[str, ...]] = {
    "is_causal": ("None", "text", "2", "-1", "1.5", "nan", "list", "int tensor", "array"),
    "deterministic": ("text", "2", "vector", "None"),
    "batch_invariant": ("text", "2", "vector", "None"),
    "return_lse": ("text", "2", "dict", "None"),
    "enable_gqa": ("text", "2", "vector"),
    "kernel": ("bytes", "2", "None", "text", "vector"),
    "window": ("2", "text", "tuple", "vector", "dict"),
    "scale": ("text", "nan", "inf", "list", "complex", "vector", "no float holds it"),
    "softcap": ("-1", "text", "nan", "inf", "None", "no float holds it"),
    "dropout_p": ("-1", "2", "text", "nan", "None", "vector"),
    "alignment": ("text", "2", "None", "vector"),
    "sinks": ("text", "2", "vector", "meta", "sparse"),
    "alibi_slopes": ("text", "2", "vector", "meta", "sparse"),
    "logit_scale": ("text", "2", "vector", "meta", "sparse"),
}


@pytest.mark.parametrize("name", ["attention", "attention_varlen", "attention_decode", "explain"])
def test_what_no_option_may_be_is_refused_under_its_own_name(name: str) -> None:
    call, sound = CALLS[name]
    for argument, kinds in NEVER.items():
        for kind in kinds:
            with pytest.raises((tilewise.Error, TypeError)) as raised:
                call(**(sound | {argument: ODD[kind]}))
            text = str(raised.value)
            assert text.startswith(argument) or "not meta or fake" in text, f"{argument}={kind}: {text}"


def test_a_window_that_no_64_bits_hold_is_refused() -> None:
    for window in ((2**63, 0), (0, 10**30), (True, 0), (1.5, 0)):
        with pytest.raises((tilewise.InvalidArgument, TypeError), match=r"^window\[[01]\]: expected"):
            tilewise.attention(**DENSE, window=window)
    assert tilewise.attention(**DENSE, window=(2**63 - 1, np.int64(3))).shape == Q.shape


# Tensors that are laid out in odd ways compute what others do.

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "expanded": lambda: torch.randn(1, 1, 5, 8).expand(2, 4, 5, 8),
    "one number": lambda: torch.randn(1, 1, 1, 1).expand(2, 4, 5, 8),
    "transposed": lambda: torch.randn(2, 4, 8, 5).transpose(-1, -2),
    "every other": lambda: torch.randn(2, 4, 10, 16)[:, :, ::2, ::2],
    "overlapping": lambda: torch.randn(100).as_strided((2, 4, 5, 8), (3, 2, 1, 1)),
    "negated": lambda: torch.view_as_complex(torch.randn(2, 4, 5, 8, 2)).conj().imag,
    "far apart": lambda: torch.randn(2**20).as_strided((2, 4, 5, 8), (2**18, 2**16, 8, 1)),
    "subclass": lambda: torch.randn(2, 4, 5, 8).as_subclass(torch.nn.Buffer),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_odd_layouts_compute_what_others_do(layout: str) -> None:
    q = LAYOUTS[layout]()
    k, v = torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 8)
    plain = q.detach().clone(memory_format=torch.contiguous_format).as_subclass(Tensor)
    found = tilewise.attention(q, k, v).as_subclass(Tensor)
    torch.testing.assert_close(found, tilewise.attention(plain, k, v))
