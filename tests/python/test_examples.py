"""Every program under examples/ says in one line what is not installed, and how to get it."""

from __future__ import annotations

import pytest
from programs import EXAMPLES, without

if not EXAMPLES.exists():
    pytest.skip("a staged tree has no examples", allow_module_level=True)
PROGRAMS = sorted(
    path.relative_to(EXAMPLES).as_posix()
    for path in EXAMPLES.rglob("*.py")
    if '__name__ == "__main__"' in path.read_text()
)


def test_the_programs_are_found() -> None:
    assert {"vit/train.py", "vit/infer.py", "llama/compare.py", "gpt/train.py"} <= set(PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("missing", ["tilewise", "torch"])
def test_what_is_not_installed_is_one_line(program: str, missing: str) -> None:
    done = without(missing, program)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and missing in done.stderr
    assert "run `pip install .` in the checkout, where torch is installed" in done.stderr
