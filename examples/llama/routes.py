"""Prefill and decoding, ours and Hugging Face's, as calls to be timed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from model import Llama, LlamaConfig
from tilewise.bench.operations.hugging_face import llama_config
from torch import Tensor

Call = Callable[[], Any]


def hugging_face(config: LlamaConfig, attention: str, device: torch.device, dtype: torch.dtype) -> Any:
    """LlamaForCausalLM of that shape, with random weights."""
    try:
        import transformers
        from tilewise.integrations import transformers as integration
    except ImportError:
        raise SystemExit("Hugging Face is not here: pip install transformers, or --against ''") from None
    integration.register()
    sizes = {"vocab_size": config.vocabulary, "num_hidden_layers": config.depth}
    shape = llama_config(config.layer, **sizes, tie_word_embeddings=False)
    with torch.device(device):
        made = transformers.LlamaForCausalLM._from_config(shape, attn_implementation=attention, dtype=dtype)
    return made.eval().requires_grad_(False)


def their_prefill(theirs: Any, attention: str, tokens: Tensor) -> Call:
    def call() -> Tensor:
        theirs.set_attn_implementation(attention)
        return theirs(tokens, use_cache=False, logits_to_keep=1).logits[:, -1]

    return call


def compile_layers(theirs: Any) -> None:
    """Layer by layer: all are alike, so one is compiled."""
    for layer in theirs.model.layers:
        layer.compile(dynamic=False)


def undo_compilation(theirs: Any) -> None:
    for layer in theirs.model.layers:
        layer._compiled_call_impl = None
    torch._dynamo.reset()


class OurDecoding:
    """A token at a time, from a CUDA graph where asked for."""

    def __init__(self, model: Llama, prompt: Tensor, steps: int, graph: bool) -> None:
        self.model, self.start = model, prompt.shape[1]
        self.caches = model.make_caches(len(prompt), self.start + steps + 2)  # two for the capture
        self.first = model(prompt, self.caches).argmax(-1, keepdim=True)
        self.token = self.first.clone()
        self.step: Call = self._step
        self.pool_bytes = 0
        if graph:
            self._step()
            torch.cuda.synchronize()
            gc.collect()
            torch.cuda.empty_cache()  # so that what is reserved from here on is the graph's pool
            before = torch.cuda.memory_reserved()
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

    def run(self, steps: int) -> Tensor:
        """The last of so many tokens after the prompt."""
        self.token.copy_(self.first)
        for cache in self.caches:
            cache.lengths.fill_(self.start)
        for _ in range(steps):
            self.step()
        return self.token


class TheirDecoding:
    def __init__(self, model: Any, attention: str, prompt: Tensor) -> None:
        self.model, self.attention, self.start = model, attention, prompt.shape[1]
        model.set_attn_implementation(attention)
        found = model(prompt, use_cache=True, logits_to_keep=1)
        self.cache = found.past_key_values
        self.first = found.logits[:, -1].argmax(-1, keepdim=True)

    def held_bytes(self) -> int:
        """Of the cache, whose rows that were cropped stay until it grows again."""
        tensors = (x for layer in self.cache.layers for x in (layer.keys, layer.values))
        return sum(x.untyped_storage().nbytes() for x in tensors)

    def run(self, steps: int) -> Tensor:
        self.model.set_attn_implementation(self.attention)
        if added := self.cache.get_seq_length() - self.start:
            self.cache.crop(-added)
        token = self.first
        for _ in range(steps):
            found = self.model(token, past_key_values=self.cache, use_cache=True)
            token = found.logits[:, -1].argmax(-1, keepdim=True)
        return token


class TheirCompiledDecoding:
    """By `generate` with a static cache, whose steps Hugging Face compiles; prefill is part of every run."""

    def __init__(self, model: Any, prompt: Tensor) -> None:
        self.model, self.prompt = model, prompt

    def run(self, steps: int) -> Tensor:
        self.model.set_attn_implementation("sdpa")
        count = {"max_new_tokens": steps + 1, "min_new_tokens": steps + 1, "do_sample": False}
        cache = {"cache_implementation": "static"}
        return self.model.generate(self.prompt, **count, **cache)[:, -1:]
