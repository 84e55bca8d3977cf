"""Gathers the pages of the site in build/docs: docs/, some files of the root, and the API of both languages.

The pages of the Python API are directives that mkdocstrings fills from docstrings. Those of the C++ API are
made here, from the comments in include/tilewise.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "docs"
FROM_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
HEADERS = (
    *("attention", "masks", "gemm", "ffn", "norm", "rope", "layer", "plan", "tensor", "context", "explain"),
    *("error", "dtype", "half", "activation", "tuning"),
)
PYTHON = {
    "attention": "attention scaled_dot_product_attention attention_varlen attention_decode "
    "merge_states explain BlockMask masks triangle_attention",
    "layer": "linear ffn rms_norm layer_norm rope_tables apply_rope rope_into_cache",
    "nn": "nn.Attention nn.MultiheadAttention nn.FeedForward nn.GatedFeedForward nn.RMSNorm nn.LayerNorm "
    "nn.RotaryEmbedding nn.TransformerLayer nn.KVCache nn.LayerConfig",
    "integrations": "integrations.sdpa integrations.transformers integrations.flash_attn "
    "integrations.vit_pytorch integrations.onnx",
    "distributed": "distributed.attention distributed.attention_varlen distributed.Layout distributed.Span "
    "distributed.contiguous distributed.zigzag distributed.striped distributed.documents "
    "distributed.balanced distributed.count_pairs distributed.shard distributed.unshard",
    "reference": "reference Error InvalidArgument Unsupported DeviceError",
}
TITLES = {
    "attention": "Attention",
    "layer": "Products, networks, norms, rotary embedding",
    "nn": "Modules",
    "integrations": "Integrations",
    "distributed": "Several processes",
    "reference": "Reference and errors",
}


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    for name in FROM_ROOT:
        (PAGES / name).write_text(in_site((ROOT / name).read_text(), depth=0))
    for page in (ROOT / "docs").rglob("*.md"):
        there = page.relative_to(ROOT / "docs")
        (PAGES / there).write_text(in_site(page.read_text(), depth=len(there.parts) - 1))
    write_python(PAGES / "api" / "python")
    write_cpp(PAGES / "api" / "cpp")


def in_site(text: str, depth: int) -> str:
    """A page with its links to files of the root, or from there to docs/, as they are in the site.

    A fence may say that its code is a fragment, for the tests of the pages. Markdown takes one word there.
    """
    up = "../" * depth
    text = re.sub(r"^(```\w+) fragment$", r"\1", text, flags=re.MULTILINE)
    blocks = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    text = "".join(block if block.startswith("```") else with_whole_names(block) for block in blocks)
    text = re.sub(r"\]\((?:\.\./)+(" + "|".join(map(re.escape, FROM_ROOT)) + r")", rf"]({up}\1", text)
    return text.replace("](docs/", "](")


def with_whole_names(text: str) -> str:
    """Gives short names in tables a class by which narrow cells do not break them (docs/site.css)."""
    rows = re.compile(r"^\|.*\|$", re.MULTILINE)
    name = re.compile(r"(?<!`)`[^`\s|]{1,20}`(?![`{])")
    return rows.sub(lambda row: name.sub(r"\g<0>{ .name }", row[0]), text)


# Python


def write_python(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, members in PYTHON.items():
        parts = [f"# {TITLES[name]}", *map(directive, members.split())]
        (folder / f"{name}.md").write_text("\n\n".join(parts) + "\n")


def directive(member: str) -> str:
    """What mkdocstrings fills. Modules are named attention, too, and their function is what is meant."""
    path = f"{member}.attention" if member in ("attention", "distributed.attention") else member
    return f"::: tilewise.{path}\n    options:\n      heading: tilewise.{member}"


# C++


def write_cpp(folder: Path) -> None:
    folder.mkdir(parents=True)
    about = [
        "# C++",
        "Include `tilewise/tilewise.h`, which includes all of these. [The guide](../../cpp.md) has examples.",
    ]
    table = ["| header | declares |", "| --- | --- |"]
    for name in HEADERS:
        text = (ROOT / "include" / "tilewise" / f"{name}.h").read_text()
        declared = list(declarations(text))
        (folder / f"{name}.md").write_text(page(name, text, declared))
        names = dict.fromkeys(name for title, _, _ in declared for name in title.split(", "))
        table.append(f"| [`{name}.h`]({name}.md) | {', '.join(f'`{one}`' for one in names)} |")
    (folder / "index.md").write_text("\n\n".join((*about, "\n".join(table))) + "\n")


def page(name: str, header: str, declared: list[tuple[str, str, str]]) -> str:
    parts = [f"# {name}.h"]
    opening = re.search(r"^namespace tilewise \{\n\n((?:// .*\n)+)\n", header, re.MULTILINE)
    if opening:
        parts.append(sentences(opening[1], "//"))
    for title, comment, code in declared:
        parts += [f"## {title}", sentences(comment, "///"), f"```cpp\n{code}\n```"]
    return "\n\n".join(part for part in parts if part) + "\n"


def declarations(header: str) -> Iterator[tuple[str, str, str]]:
    """(title, comment, code) of what stands in the namespace, neighbours that share a comment together."""
    body = header.partition("namespace tilewise {\n")[2].rpartition("}  // namespace tilewise")[0]
    body = re.sub(r"\n private:\n.*?^(?=\};)", "", body, flags=re.DOTALL | re.MULTILINE)
    for paragraph in statements(body):
        comment, code = leading_comment(paragraph)
        if title := title_of(code):
            yield title, comment, code


def statements(body: str) -> Iterator[str]:
    """Pieces of a namespace: a type with its braces, or functions without an empty line between."""
    piece: list[str] = []
    depth = 0
    for line in body.splitlines():
        if depth == 0 and (
            not line.strip() or (line.startswith("///") and piece and not piece[-1].startswith("///"))
        ):
            if piece:
                yield "\n".join(piece)
            piece = []
        if line.strip() or depth:
            piece.append(line)
        bare = re.sub(r"//.*|\"[^\"]*\"", "", line)
        depth += bare.count("{") - bare.count("}")
    if piece:
        yield "\n".join(piece)


def leading_comment(paragraph: str) -> tuple[str, str]:
    lines = paragraph.splitlines()
    count = next((n for n, line in enumerate(lines) if not line.startswith("///")), len(lines))
    return "\n".join(lines[:count]), "\n".join(lines[count:])


def title_of(code: str) -> str | None:
    """The name of a type or variable, or those of all functions; none of comments and specialisations."""
    if not code.strip() or code.startswith(("//", "#", "template <>")):
        return None
    if found := re.search(r"^(?:template <.*>\n)?(?:struct|class|enum class) (\w+)", code):
        behind = re.search(r"^\};\n(\w.*)", code, re.DOTALL | re.MULTILINE)  # functions right behind the type
        return ", ".join(filter(None, (found[1], behind and title_of(behind[1]))))
    if found := re.search(r"^using (\w+)", code):
        return found[1]
    functions = [found[1] for line in code.splitlines() if (found := re.match(r"\w.*?(\w+)\(", line))]
    if functions:
        return ", ".join(dict.fromkeys(functions))
    found = re.search(r"(\w+) =", code)
    return found[1] if found else None


def sentences(comment: str, mark: str) -> str:
    return "\n".join(line.strip().removeprefix(mark).strip() for line in comment.splitlines())


if __name__ == "__main__":
    main()
