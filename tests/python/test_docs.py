"""Links and anchors of every page lead somewhere, and the site's navigation has every page."""

from __future__ import annotations

import doctest
import re
import sys
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest
import tilewise
import tilewise.distributed
from programs import load

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LONGEST = 1500  # words of a design page; what is measured goes to docs/lab
DESIGN = (
    *("contract", "cpu", "design", "gemm", "ladder", "layer", "mma", "mma_f32", "numerics", "triton"),
    *("wgmma", "wgmma_backward", "wide"),
)


def pages() -> list[Path]:
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "results").glob("*.md")]
    return sorted(found) if (ROOT / "README.md").exists() else []


def prose(path: Path) -> str:
    """The page without its blocks of code."""
    return FENCE.sub("", path.read_text())


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return frozenset(found)


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if re.match(r"https://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: no file for {target}"
        if anchor:
            assert anchor in anchors(path), f"{page.name}: no heading for {target}"


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_documents_named_in_code_style_exist(page: Path) -> None:
    for name in re.findall(r"`(docs/[\w/]+\.md)`", prose(page)):
        assert (ROOT / name).exists(), f"{page.name}: no {name}"


def test_the_navigation_has_every_page_once() -> None:
    if not pages():
        pytest.skip("a staged tree has no pages")
    listed = re.findall(r"^\s*- (?:[^:\n]+: )?([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    made = {name for name in listed if name.startswith("api/")} | {"CHANGELOG.md", "CONTRIBUTING.md"}
    assert set(listed) - made == written


@pytest.mark.parametrize("name", DESIGN)
def test_design_pages_are_short(name: str) -> None:
    if not pages():
        pytest.skip("a staged tree has no pages")
    words = len(prose(ROOT / "docs" / f"{name}.md").split())
    assert words <= LONGEST, f"docs/{name}.md has {words} words"


def test_every_lab_page_has_a_date() -> None:
    for path in (ROOT / "docs" / "lab").glob("*.md"):
        if path.name != "index.md":
            assert re.search(r"Lab notes, last changed \d{4}-\d{2}-\d{2}", path.read_text()), path


def test_the_built_site_fetches_nothing_from_elsewhere() -> None:
    site = ROOT / "build" / "site"
    if not site.exists():
        pytest.skip("no site; make docs builds it")
    for page in site.rglob("*.html"):
        found = re.findall(
            r"<(?:script|link|img|iframe)[^>]*\b(?:src|href)=\"(https?:[^\"]*)\"", page.read_text()
        )
        assert not found, f"{page.relative_to(site)}: {found}"


def test_examples_of_docstrings_are_blocks_of_code_in_the_built_site() -> None:
    folder = ROOT / "build" / "site" / "api" / "python"
    if not folder.exists():
        pytest.skip("no site; make docs builds it")
    for page in folder.glob("*.html"):
        text = page.read_text()
        assert "&gt;&gt;&gt;" in text or page.stem in ("integrations", "distributed"), page.name
        assert not re.search(r"<blockquote|<h\d[^>]*>[#+. ]+<", text), f"{page.name}: an example is no code"


def test_every_fence_is_a_block_of_code_in_the_site() -> None:
    """Markdown takes one word after a fence; a second one made the code a paragraph."""
    docs_pages = load("scripts/docs_pages.py")
    for page in pages():
        text = docs_pages.in_site(page.read_text(), depth=0)
        wrong = [line for line in text.splitlines() if re.match(r"\s*```\S* \S", line)]
        assert not wrong, f"{page.name}: {wrong}"
    for built in (ROOT / "build" / "site").rglob("*.html"):
        assert "```" not in built.read_text(), built.name


def test_short_names_in_tables_are_marked_and_nothing_else() -> None:
    text = "| `a`, [`b.c`](d.md) | ``| ` |`` | `two words` |\n`e` | f\n```\n| `g` |\n```\n"
    marked = (
        "| `a`{ .name }, [`b.c`{ .name }](d.md) | ``| ` |`` | `two words` |\n`e` | f\n```\n| `g` |\n```\n"
    )
    assert load("scripts/docs_pages.py").in_site(text, depth=0) == marked


def test_the_python_pages_name_functions_and_not_the_modules_of_that_name() -> None:
    docs_pages = load("scripts/docs_pages.py")
    for member in " ".join(docs_pages.PYTHON.values()).split():
        if member.startswith("integrations."):  # these are modules
            continue
        if isinstance(attrgetter(member)(tilewise), FunctionType):
            path = docs_pages.directive(member).split()[1]
            assert path not in sys.modules, f"{path} is a module, too"


def test_arguments_that_share_a_line_get_one_each_on_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object))
    examples = load("scripts/docs_examples.py")
    found = doctest.testmod(examples)
    assert found.attempted and not found.failed
    value = "Does it.\n\nArgs:\n    a, b: [x, y: z].\n    c: no.\n\nReturns:\n    k, v: both."
    assert examples.one_by_one(value).splitlines()[3:5] == ["    a: [x, y: z].", "    b: [x, y: z]."]
    assert examples.one_by_one(value).endswith("    c: no.\n\nReturns:\n    k, v: both.")


def test_the_cpp_pages_have_every_type_and_function_of_the_headers() -> None:
    docs_pages = load("scripts/docs_pages.py")
    listed = {path.stem for path in (ROOT / "include" / "tilewise").glob("*.h")} - {"tilewise", "version"}
    assert set(docs_pages.HEADERS) == listed
    for header in docs_pages.HEADERS:
        text = (ROOT / "include" / "tilewise" / f"{header}.h").read_text()
        titles, _, codes = zip(*docs_pages.declarations(text), strict=True)
        assert not any("private:" in code for code in codes), header
        names = {name for title in titles for name in title.split(", ")}
        declared = re.findall(r"^(?:struct|class|enum class) (\w+)(?:;| :| \{)", text, re.MULTILINE)
        declared += re.findall(
            r"^(?!template|struct|class|enum|using|//| )\w[^=;{\n]*?(\w+)\(", text, re.MULTILINE
        )
        assert set(declared) - names <= {"dtype_of"}, header


def test_pictures_of_masks_show_what_the_functions_make() -> None:
    pictures = load("scripts/mask_pictures.py")
    page = (ROOT / "docs" / "masks.md").read_text()
    for name, make in pictures.PICTURES.items():
        drawn = pictures.drawn(name, make())
        assert (ROOT / "docs" / f"mask-{name}.svg").read_text() == drawn, "run scripts/mask_pictures.py"
        assert f"(mask-{name}.svg)" in page
