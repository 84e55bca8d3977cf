"""Memory that is not there: torch's own exception, with the bytes that were asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tilewise
import torch
from tilewise import _errors
from torch import Tensor

HUGE = 2**43  # rows of 64 bytes that exist once, and whose results would exist as often as that


def repeated(*shape: int, device: Any) -> Tensor:
    """A tensor of that shape which takes the memory of its last dimension alone."""
    return torch.zeros(shape[-1], device=device).expand(shape)


def attention(device: Any, **options: Any) -> Tensor:
    q = repeated(2**10, 2**10, 2**23, 16, device=device)
    k = repeated(2**10, 2**10, 1, 16, device=device)
    return tilewise.attention(q, k, k, **options)


def linear(device: Any) -> Tensor:
    return tilewise.linear(repeated(HUGE, 16, device=device), torch.zeros(16, 16, device=device))


def copied(device: Any) -> Tensor:
    """Rows that are no rows in memory have to be copied first."""
    x = torch.zeros(1, 1, device=device).expand(HUGE, 16)
    return tilewise.linear(x, torch.zeros(16, 16, device=device))


def turned(device: Any) -> Tensor:
    x = repeated(2**10, 2**10, 2**23, 16, device=device)
    return tilewise.apply_rope(x, None, *tilewise.rope_tables(16, 16, device=device))


CALLS: dict[str, Callable[[Any], Any]] = {
    "attention": attention,
    "attention with options": lambda device: attention(device, window=(1, 1)),
    "linear": linear,
    "a copy": copied,
    "ffn": lambda device: tilewise.ffn(
        repeated(HUGE, 16, device=device), *torch.zeros(2, 16, 16, device=device)
    ),
    "rms_norm": lambda device: tilewise.rms_norm(repeated(HUGE, 16, device=device)),
    "apply_rope": turned,
}


@pytest.mark.parametrize("name", CALLS)
def test_torchs_own_exception_says_how_much_was_asked_for(device: torch.device, name: str) -> None:
    with pytest.raises(RuntimeError) as raised:
        CALLS[name](device)
    text = str(raised.value)
    assert "aoti_torch" not in text and "tilewise." not in text
    if device.type == "cuda":
        assert type(raised.value) is torch.OutOfMemoryError
        assert "out of memory" in text
    else:
        assert "DefaultCPUAllocator: can't allocate memory" in text and str(64 * HUGE) in text


def test_a_gradient_that_finds_no_memory_raises_the_same(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"tilewise.OutOfMemory: tried to allocate {64 * HUGE} bytes on {device.type}"

    def fail(*_: Any) -> Any:
        raise RuntimeError(text)

    monkeypatch.setattr("tilewise._ops._attention_training_backward", fail)
    monkeypatch.setattr("tilewise._ops.attention_backward", None)
    monkeypatch.setattr("tilewise._ops._below_autograd", fail)
    x = torch.randn(1, 2, 3, 8, device=device, requires_grad=True)
    kind = torch.OutOfMemoryError if device.type == "cuda" else RuntimeError
    with pytest.raises(kind) as raised:
        tilewise.attention(x, x, x).sum().backward()
    assert "tilewise." not in str(raised.value)


def test_memory_that_came_back_is_said_to_have_been_missing(device: torch.device) -> None:
    error = _errors.translated(
        RuntimeError(f"tilewise.OutOfMemory: tried to allocate 64 bytes on {device}"), {}, {}
    )
    assert type(error) is (torch.OutOfMemoryError if device.type == "cuda" else RuntimeError)
    assert "64 bytes" in str(error)


def test_compiled_code_says_the_same_in_an_exception_it_can_raise(device: torch.device) -> None:
    torch._dynamo.reset()
    q, k = (repeated(2**10, 2**10, n, 16, device=device) for n in (2**23, 1))
    with pytest.raises(RuntimeError, match=f"^tilewise.OutOfMemory: tried to allocate {64 * HUGE} bytes on"):
        torch.compile(tilewise.attention, backend="aot_eager", dynamic=False)(q, k, k)
