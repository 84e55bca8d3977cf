"""Prefill and decoding, ours and Hugging Face's, as calls to be timed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from model import Llama, LlamaConfig
from tilewise.bench.operations.hugging_face import llama_config
from tilewise.bench.problem import BadInput
from torch import Tensor
from torch._dynamo.utils import counters

COMPILE_MODE = "reduce-overhead"  # that of the steps which `generate` compiles: CUDA graphs on a GPU


def nothing() -> None:
    pass


@dataclass(frozen=True)
class Call:
    """What is timed, and what makes it ready before the clock starts."""

    run: Callable[[], Any]
    prepare: Callable[[], Any] = nothing

    def __call__(self) -> Any:
        self.prepare()
        return self.run()


def first_line(error: Exception) -> str:
    """Of its text, with the next where that only says who raised it.

    >>> first_line(RuntimeError("backend raised:\\nInvalidCxxCompiler: none found\\n\\nYou can"))
    'backend raised: InvalidCxxCompiler: none found'
    >>> first_line(KeyError())
    'KeyError'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def hugging_face(config: LlamaConfig, attention: str, device: torch.device, dtype: torch.dtype) -> Any:
    """LlamaForCausalLM of that shape, with random weights."""
    try:
        from tilewise.integrations import transformers as integration
        from transformers import LlamaForCausalLM
    except ImportError as error:  # of transformers, or of a package that it needs
        remedy = "pip install transformers, or --against ''"
        raise SystemExit(f"Hugging Face is not here: {remedy} ({first_line(error)})") from None
    integration.register()
    sizes = {"vocab_size": config.vocabulary, "num_hidden_layers": config.depth}
    shape = llama_config(config.layer, **sizes, tie_word_embeddings=False)
    with torch.device(device):
        made = LlamaForCausalLM._from_config(shape, attn_implementation=attention, dtype=dtype)
    return made.eval().requires_grad_(False)


def their_prefill(theirs: Any, attention: str, tokens: Tensor) -> Call:
    def run() -> Tensor:
        return theirs(tokens, use_cache=False, logits_to_keep=1).logits[:, -1]

    return Call(run, partial(theirs.set_attn_implementation, attention))


def compile_layers(theirs: Any) -> None:
    """Layer by layer: all are alike, so one is compiled."""
    for layer in theirs.model.layers:
        layer.compile(dynamic=False)


def undo_compilation(theirs: Any) -> None:
    for layer in theirs.model.layers:
        layer._compiled_call_impl = None
    torch._dynamo.reset()


def reserved_bytes() -> int:
    """What PyTorch holds of the GPU's memory, but for what it could give back."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


class OurDecoding:
    """A token at a time, from a CUDA graph where asked for."""

    def __init__(self, model: Llama, prompt: Tensor, steps: int, graph: bool) -> None:
        self.model, self.start = model, prompt.shape[1]
        self.caches = model.make_caches(len(prompt), self.start + steps + 2)  # two for the capture
        self.first = model(prompt, self.caches).argmax(-1, keepdim=True)
        self.token = self.first.clone()
        self.step: Callable[[], Any] = self._step
        self.pool_bytes = 0
        if graph:
            self._step()
            before = reserved_bytes()
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                self._step()
            self.pool_bytes = torch.cuda.memory_reserved() - before
            self.step = captured.replay

    def _step(self) -> None:
        self.token.copy_(self.model(self.token, self.caches).argmax(-1, keepdim=True))

    def held_bytes(self) -> int:
        """Between runs: the caches, and what a graph keeps for itself."""
        return self.pool_bytes + sum(cache.k.nbytes + cache.v.nbytes for cache in self.caches)

    def reset(self) -> None:
        """Back to the end of the prompt."""
        self.token.copy_(self.first)
        for cache in self.caches:
            cache.lengths.fill_(self.start)

    def run(self, steps: int) -> Tensor:
        """The last of so many tokens after the prompt."""
        for _ in range(steps):
            self.step()
        return self.token


class TheirDecoding:
    """A token at a time over a cache that grows."""

    def __init__(self, model: Any, attention: str, prompt: Tensor) -> None:
        self.model, self.attention, self.start = model, attention, prompt.shape[1]
        self.forward: Callable[..., Any] = model
        model.set_attn_implementation(attention)
        self.cache = self._make_cache()
        found = model(prompt, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.first = found.logits[:, -1].argmax(-1, keepdim=True)

    def _make_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def held_bytes(self) -> int:
        """Of the cache, whose rows that were cropped stay until it grows again."""
        tensors = (x for layer in self.cache.layers for x in (layer.keys, layer.values))
        return sum(x.untyped_storage().nbytes() for x in tensors)

    def reset(self) -> None:
        self.model.set_attn_implementation(self.attention)
        if added := self.cache.get_seq_length() - self.start:
            self.cache.crop(-added)

    def run(self, steps: int) -> Tensor:
        token = self.first
        for _ in range(steps):
            found = self.forward(token, past_key_values=self.cache, use_cache=True)
            token = found.logits[:, -1].argmax(-1, keepdim=True)
        return token


class TheirCompiledDecoding(TheirDecoding):
    """The same loop over a static cache, whose steps are compiled as `generate` compiles its own."""

    WARM_UP = 3  # steps: one compiles, one records, one replays

    def __init__(self, model: Any, prompt: Tensor, steps: int) -> None:
        self.capacity = prompt.shape[1] + max(steps, self.WARM_UP)
        super().__init__(model, "sdpa", prompt)
        self.lengths = [length_of(layer) for layer in self.cache.layers]
        self.forward = torch.compile(model.__call__, mode=COMPILE_MODE)
        counters.clear()
        before = reserved_bytes() if prompt.is_cuda else 0
        self.run(self.WARM_UP)
        self.pool_bytes = reserved_bytes() - before if prompt.is_cuda else 0

    def _make_cache(self) -> Any:
        from transformers import StaticCache

        return StaticCache(config=self.model.config, max_cache_len=self.capacity)

    def held_bytes(self) -> int:
        """Between runs: the cache, and what the graphs keep for themselves."""
        return self.pool_bytes + super().held_bytes()

    def reset(self) -> None:
        self.model.set_attn_implementation(self.attention)
        for length in self.lengths:
            length.fill_(self.start)

    def compilations(self) -> dict[str, int]:
        """Graphs that were compiled so far, and how many of them are no CUDA graph on a GPU."""
        found = {"compiled_graphs": counters["stats"]["unique_graphs"]}
        if self.first.is_cuda:
            found["cudagraph_skips"] = counters["inductor"]["cudagraph_skips"]
        return found


def length_of(layer: Any) -> Tensor:
    """How many tokens a static cache's layer has, in the tensor that compiled steps read and change."""
    found = getattr(layer, "cumulative_length", None)
    if not isinstance(found, Tensor):
        import transformers

        here = f"{layer!r} of transformers {transformers.__version__} has no tensor cumulative_length"
        raise BadInput(f"--against compiled: {here}; those of 5.17.0 and 5.22.2 have")
    return found
