"""vit-pytorch's models on Tilewise: `switch(model)`.

`vit_pytorch.vit` and `simple_vit`, and the wrappers built on them, multiply matrices themselves, so that
`tilewise.integrations.sdpa` has nothing to replace. Those of vit-pytorch's models that call
`scaled_dot_product_attention` (na_vit, vivit, simple_flash_attn_vit, ...) are switched by `sdpa.use()`.

    from tilewise.integrations import vit_pytorch

    vit_pytorch.switch(model)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tilewise._errors import reject
from tilewise.attention import attention

__all__ = ["switch"]

_HOMES = ("vit_pytorch.vit", "vit_pytorch.simple_vit")


def switch(model: nn.Module) -> int:
    """Makes every layer of attention in the model compute by Tilewise, in place.

    Weights and state dicts stay as they are. Hooks on the softmax inside, such as those of vit-pytorch's
    Recorder, are not called any more: the weights are never formed.

    Returns:
        How many layers there are. None is an error; those that were switched before are counted.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected torch.nn.Module, got {type(model).__name__}")
    found = [module for module in model.modules() if isinstance(module, _Forward) or _is_theirs(module)]
    if not found:
        reject("model", f"an Attention of {' or '.join(_HOMES)}", f"none in {type(model).__name__}")
    for module in filter(_is_theirs, found):
        module.__class__ = type("Attention", (_Forward, type(module)), {"__module__": __name__})
    return len(found)


def _is_theirs(module: nn.Module) -> bool:
    return type(module).__name__ == "Attention" and type(module).__module__ in _HOMES


class _Forward:
    """Before the layer's own class, so that its forward is this one."""

    def forward(self: Any, x: Tensor) -> Tensor:
        qkv = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        query, key, value = (rows.unflatten(-1, (self.heads, -1)).transpose(1, 2) for rows in qkv)
        dropout = getattr(self, "dropout", None)
        out = attention(
            *(query, key, value),
            dropout_p=dropout.p if dropout is not None and self.training else 0.0,
            scale=self.scale,
        )
        return self.to_out(out.transpose(1, 2).flatten(2))
