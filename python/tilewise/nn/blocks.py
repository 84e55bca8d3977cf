"""The parts of a transformer layer around attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tilewise._errors import reject
from tilewise._scalars import at_least, flag_of, number_of, text_of, whole_of
from tilewise.functional import ACTIVATIONS, Activation, apply_rope, ffn, layer_norm, rms_norm, rope_tables


class RMSNorm(nn.Module):
    """`torch.nn.RMSNorm` over the last dimension, with the residual add before it in the same pass.

    >>> norm = RMSNorm(16)
    >>> x, y = torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    >>> out, summed = norm(x, residual=y)
    >>> torch.equal(summed, x + y) and torch.allclose(out, norm(x + y))
    True
    """

    weight: Tensor | None

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        at_least(1, dim=dim)
        _check_eps(eps)
        flag_of("elementwise_affine", elementwise_affine)
        self.dim, self.eps = dim, eps
        self.weight = (
            nn.Parameter(torch.ones(dim, device=device, dtype=dtype)) if elementwise_affine else None
        )

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """out, or (out, x + residual) where there is a residual."""
        return rms_norm(x, self.weight, self.eps, residual=residual)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, elementwise_affine={self.weight is not None}"


class LayerNorm(nn.Module):
    """`torch.nn.LayerNorm` over the last dimension, with the residual add before it in the same pass.

    >>> theirs, ours = torch.nn.LayerNorm(16), LayerNorm(16)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> x = torch.randn(2, 3, 16)
    >>> torch.allclose(ours(x), theirs(x), atol=1e-6)
    True
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        at_least(1, dim=dim)
        _check_eps(eps)
        flag_of("elementwise_affine", elementwise_affine)
        flag_of("bias", bias)
        self.dim, self.eps = dim, eps
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.ones(dim, **where)) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros(dim, **where)) if elementwise_affine and bias else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """out, or (out, x + residual) where there is a residual."""
        return layer_norm(x, self.weight, self.bias, self.eps, residual=residual)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}, elementwise_affine={self.weight is not None}"


class FeedForward(nn.Module):
    """down(f(up(x))), with what lies between in chunks and, unless asked for, not kept.

    Args:
        embed_dim: E, the width of input and output.
        ffn_dim: F, the width between.
        activation: f; see `tilewise.linear`.
        bias: whether the two products have one.
        max_intermediate_bytes: bound on the memory of what lies between; 0: 512 MiB.
        keep_products: whether a backward finds what stood before the activation; see `tilewise.ffn`.

    >>> layer = FeedForward(embed_dim=16, ffn_dim=64)
    >>> layer(torch.randn(2, 3, 16)).shape
    torch.Size([2, 3, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        ffn_dim: int,
        activation: Activation = "gelu",
        bias: bool = True,
        *,
        max_intermediate_bytes: int = 0,
        keep_products: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        at_least(1, embed_dim=embed_dim, ffn_dim=ffn_dim)
        at_least(0, max_intermediate_bytes=max_intermediate_bytes)
        text_of("activation", activation, *ACTIVATIONS)
        flag_of("bias", bias)
        flag_of("keep_products", keep_products)
        self.activation, self.max_intermediate_bytes = activation, max_intermediate_bytes
        self.keep_products = keep_products
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.up_proj = nn.Linear(embed_dim, ffn_dim, bias, **where)
        self.down_proj = nn.Linear(ffn_dim, embed_dim, bias, **where)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., E]; the residual is added to the result in the same pass."""
        return ffn(
            *(x, self.up_proj.weight, self.down_proj.weight),
            up_bias=self.up_proj.bias,
            down_bias=self.down_proj.bias,
            residual=residual,
            activation=self.activation,
            max_intermediate_bytes=self.max_intermediate_bytes,
            keep_products=self.keep_products,
        )

    def extra_repr(self) -> str:
        return f"activation={self.activation}"


class GatedFeedForward(nn.Module):
    """down(f(gate(x)) ⊙ up(x)): SwiGLU, or GEGLU with activation="gelu". Else as `FeedForward`.

    >>> layer = GatedFeedForward(embed_dim=16, ffn_dim=44)
    >>> layer(torch.randn(2, 3, 16)).shape
    torch.Size([2, 3, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        ffn_dim: int,
        activation: Activation = "silu",
        bias: bool = False,
        *,
        max_intermediate_bytes: int = 0,
        keep_products: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        at_least(1, embed_dim=embed_dim, ffn_dim=ffn_dim)
        at_least(0, max_intermediate_bytes=max_intermediate_bytes)
        text_of("activation", activation, *ACTIVATIONS)
        flag_of("bias", bias)
        flag_of("keep_products", keep_products)
        self.activation, self.max_intermediate_bytes = activation, max_intermediate_bytes
        self.keep_products = keep_products
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate_proj = nn.Linear(embed_dim, ffn_dim, bias, **where)
        self.up_proj = nn.Linear(embed_dim, ffn_dim, bias, **where)
        self.down_proj = nn.Linear(ffn_dim, embed_dim, bias, **where)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., E]; the residual is added to the result in the same pass."""
        return ffn(
            *(x, self.up_proj.weight, self.down_proj.weight),
            gate=self.gate_proj.weight,
            up_bias=self.up_proj.bias,
            gate_bias=self.gate_proj.bias,
            down_bias=self.down_proj.bias,
            residual=residual,
            activation=self.activation,
            max_intermediate_bytes=self.max_intermediate_bytes,
            keep_products=self.keep_products,
        )

    def extra_repr(self) -> str:
        return f"activation={self.activation}"


class RotaryEmbedding(nn.Module):
    """`tilewise.apply_rope` with its tables, which stay in f32 whatever type the module is moved to.

    Args:
        head_dim: D.
        max_positions: rows of the tables.
        base: of the angles, base^(-2n/R).
        rotary_dim: R, how many elements of a head are turned; D by default.
        interleaved: which elements make a pair; see `tilewise.apply_rope`.
        inverse_frequencies: [R/2], in place of what `base` gives: for scaled embeddings.

    >>> rotary = RotaryEmbedding(8, max_positions=32)
    >>> q, k = rotary(torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.arange(7, 12))
    >>> q.shape, k.shape
    (torch.Size([1, 4, 5, 8]), torch.Size([1, 2, 5, 8]))
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        *,
        inverse_frequencies: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        at_least(1, head_dim=head_dim, max_positions=max_positions)
        flag_of("interleaved", interleaved)
        rotary_dim = head_dim if rotary_dim is None else whole_of("rotary_dim", rotary_dim)
        if not 0 <= rotary_dim <= head_dim or rotary_dim % 2:
            reject("rotary_dim", f"an even number up to head_dim {head_dim}", rotary_dim)
        self.max_positions, self.rotary_dim, self.base = max_positions, rotary_dim, base
        self.interleaved, self.inverse_frequencies = interleaved, inverse_frequencies
        self._fill(device)

    def _fill(self, device: torch.device | str | None) -> None:
        tables = rope_tables(
            *(self.max_positions, self.rotary_dim, self.base),
            inverse_frequencies=self.inverse_frequencies,
            device=device,
        )
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, table, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)
        if self.cos.dtype != torch.float32:
            self._fill(self.cos.device)
        return self

    def forward(self, query: Tensor, key: Tensor | None = None, positions: Tensor | None = None) -> Any:
        """(query, key) turned, or query alone."""
        return apply_rope(query, key, self.cos, self.sin, positions, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        return f"rotary_dim={self.rotary_dim}, max_positions={self.max_positions}, base={self.base}"


def _check_eps(eps: float) -> None:
    if not 0.0 <= number_of("eps", eps) < math.inf:
        reject("eps", "a finite number, 0 or above", eps)
