"""What torch.jit.script says of Tilewise: one sentence with a way out.

TorchScript cannot compile the Python in front of the operators. torch.jit.trace needs none of it: a trace
holds the operators themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from tilewise._errors import Unsupported


def refuse_scripting(*things: Callable[..., Any] | type[nn.Module]) -> None:
    """Makes torch.jit.script raise for each of these functions and classes of modules."""
    for thing in things:
        thing.__prepare_scriptable__ = _refusal(thing)  # type: ignore[union-attr]  # torch.jit.script calls it


def _refusal(thing: Any) -> Callable[..., NoReturn]:
    package = "tilewise.nn" if isinstance(thing, type) else "tilewise"

    def refuse(*_: Any) -> NoReturn:
        instead = "use torch.jit.trace, torch.compile or torch.export"
        raise Unsupported(f"{package}.{thing.__name__} cannot be scripted: {instead}")

    return refuse
