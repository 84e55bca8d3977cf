"""Hugging Face models on Tilewise: `attn_implementation="tilewise"`.

>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> from tilewise.integrations import transformers
>>> transformers.register()
>>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 16}
>>> config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
>>> model = LlamaForCausalLM._from_config(config, attn_implementation="tilewise")
>>> model(torch.tensor([[1, 2, 3]])).logits.shape
torch.Size([1, 3, 16])
"""

from __future__ import annotations

from inspect import signature
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewise._arguments import Window
from tilewise._errors import InvalidArgument, Unsupported, reject
from tilewise._scalars import text_of
from tilewise.attention import attention

if TYPE_CHECKING:  # it brings DTensor with it
    from tilewise.distributed.attention import Method
    from tilewise.distributed.layout import Layout

# Names that transformers reads more into than which function to call.
_TAKEN = ("flash", "sdpa", "flex_attention", "eager", "paged|")

# What a model may ask for beyond the arguments of `attention_forward`. Other names cannot be refused: layers
# pass on to the attention function whatever they were given themselves.
_REFUSED = {
    "output_attentions": "the weights are never formed; use attn_implementation='eager' to see them",
    "cache": "the paged cache of continuous batching",
    "indices": "keys chosen for each query by an indexer",
    "block_indices": "blocks of keys chosen for each query by an indexer",
    "head_mask": "a factor for the weights of each head",
}
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k")
_LOOKED_AT = {*_REFUSED, *_PACKED}


def register(name: str = "tilewise") -> None:
    """Makes `attn_implementation=name` known to transformers; call it once, before or after making a model.

    It holds for `from_pretrained`, `_from_config` and `set_attn_implementation`. Registering again changes
    nothing.

    Args:
        name: what models shall call it. Names in which transformers sees one of its own are refused.

    >>> register()
    >>> from transformers import AttentionInterface
    >>> "tilewise" in AttentionInterface().valid_keys()
    True
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    text_of("name", name)
    if any(taken in name for taken in _TAKEN):
        raise InvalidArgument(f"name: expected a name without {', '.join(_TAKEN)}, got {name!r}")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)  # without it models are given no masks at all


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers' models call.

    Args:
        module: the model's attention layer; `module.is_causal` counts where `is_causal` is None.
        query: [B, Hq, Sq, D].
        key: [B, Hkv, Sk, D], heads not repeated.
        value: [B, Hkv, Sk, Dv].
        attention_mask: broadcasts to [B, Hq, Sq, Sk]; boolean (true attends), or floating and added to the
            score. It holds causality and window. Without one, query i stands at key i, and a single query at
            the last key.
        dropout: probability of dropping a weight while the module trains.
        scaling: factor of the score, 1/√D by default.
        is_causal: whether a query sees no later keys.
        sliding_window: how many keys a causal query sees, its own among them; else as many to both sides.
        softcap: c replaces each score s by c·tanh(s/c).
        s_aux: [Hq], a sink's logit for each head. Has a gradient.
        position_bias: broadcasts to [B, Hq, Sq, Sk] and is added to the score. Has a gradient.
        others: what the layer was given besides. What would change the result raises NotImplementedError.

    Returns:
        (out [B, Sq, Hq, Dv] contiguous, None).

    >>> layer = torch.nn.Module()
    >>> q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    >>> attention_forward(layer, q, k, k, None, is_causal=True, sliding_window=3)[0].shape
    torch.Size([1, 6, 4, 8])
    """
    if not _LOOKED_AT.isdisjoint(others):
        _refuse(others, attention_mask)
    options = _options(module, dropout, scaling, is_causal, sliding_window, softcap, s_aux)
    if attention_mask is not None:
        options |= dict(is_causal=False, window=None)
    if query.shape[2] == 1:  # a newest token, whose position is the last key's
        options["is_causal"] = False
        if options["window"] is not None:  # else top_left is the short way
            options["alignment"] = "bottom_right"
    out = attention(query, key, value, _joined(attention_mask, position_bias), **options)
    return out.transpose(1, 2).contiguous(), None


def _options(
    module: torch.nn.Module,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    sliding_window: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> dict[str, Any]:
    """attention's, of what transformers' models ask for."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window: Window | None = None
    if sliding_window is not None:
        window = (sliding_window - 1, None if causal else sliding_window - 1)
    return dict(
        dropout_p=dropout if module.training else 0.0,
        is_causal=causal,
        scale=scaling,
        enable_gqa=True,
        window=window,
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
    )


def attention_mask(
    *sizes: Any,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Tensor | None:
    """The mask that `attention_forward` is given: boolean [B, 1, Sq, Sk], or None where none is needed.

    Args:
        sizes: of batch, queries and keys, as transformers passes them.
        attention_mask: boolean [B, Sk], false for padding.
        local_size: width of a window or chunk.
        allow_is_bidirectional_skip: whether a mask that hides nothing may be left out.
        options: the others of transformers' own mask functions.

    >>> attention_mask(1, 2, 3, attention_mask=torch.tensor([[False, True, True]]))
    tensor([[[[False, False, False],
              [False,  True, False]]]])
    """
    from transformers.masking_utils import sdpa_mask

    if allow_is_bidirectional_skip and attention_mask is None and local_size is None:
        return None  # also while torch.export traces, where sdpa_mask would build one
    options["allow_is_bidirectional_skip"] = allow_is_bidirectional_skip
    make: Any = sdpa_mask  # its signature differs from version to version
    return make(*sizes, attention_mask=attention_mask, local_size=local_size, **options)


def _refuse(others: dict[str, Any], mask: Tensor | None) -> None:
    for name, meaning in _REFUSED.items():
        asked = others.get(name)
        if asked is not None and asked is not False:
            raise Unsupported(f"{name}: {meaning}; Tilewise does not support it")
    if mask is None and any(others.get(name) is not None for name in _PACKED):
        raise Unsupported(
            "cu_seq_lens_q: packed sequences need position_ids that restart at 0, from which the mask is made"
        )


def _joined(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if bias is None or mask is None:
        return mask if bias is None else bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else mask + bias


def context_parallel(
    model: Any, mesh: Any = None, *, method: Method = "ring", layout: Layout | str = "zigzag"
) -> None:
    """Makes a decoder attend over a sequence that the ranks of a mesh hold together.

    Every rank then calls the model on its own tokens, with `position_ids` that say where they stand in the
    sequence: `layout.positions(rank)` of a `tilewise.distributed.Layout`. Logits are those of its tokens. For
    a loss, shift the labels of the whole sequence, shard them, and give them as `labels` and `shift_labels`.
    Gradients of weights are each rank's share: sum them over the mesh.

    Args:
        model: a causal decoder without padding, called without a cache.
        mesh, method, layout: as in `tilewise.distributed.attention`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    from tilewise.distributed import attention as attend

    def over_ranks(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        _refuse(others, attention_mask)
        if others.get("position_bias") is not None:
            raise Unsupported("position_bias: a position bias cannot be sharded; use a single process")
        if attention_mask is not None:
            raise Unsupported("attention_mask: a mask of one's own is not supported on several ranks")
        if key.shape[2] != query.shape[2]:
            raise Unsupported("past_key_values: a cache is not supported on several ranks; train or score")
        options = _options(module, dropout, scaling, is_causal, sliding_window, softcap, s_aux)
        out = attend(query, key, value, mesh=mesh, method=method, layout=layout, **options)
        return out.transpose(1, 2).contiguous(), None

    name = f"tilewise_ranks_{next(_numbers)}"
    AttentionInterface.register(name, over_ranks)
    AttentionMaskInterface.register(name, _no_mask)
    model.set_attn_implementation(name)
    parameters = list(signature(model.forward).parameters)
    place = parameters.index("position_ids") if "position_ids" in parameters else None

    def look(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if module.config._attn_implementation != name:
            return
        if place is not None and len(given) <= place and named.get("position_ids") is None:
            reject("position_ids", "where this rank's tokens stand in the sequence", "none")
        if named.get("labels") is not None and named.get("shift_labels") is None:
            reject("shift_labels", "labels that were shifted before they were sharded", "none")

    model.register_forward_pre_hook(look, with_kwargs=True)


_numbers = count()


def _no_mask(*sizes: Any, attention_mask: Tensor | None = None, **options: Any) -> None:
    """Ranks know causality and windows from positions, and nothing of padding."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise Unsupported("attention_mask: padding is not supported on several ranks; pack sequences instead")
