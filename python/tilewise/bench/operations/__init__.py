"""The operations around attention as problems of a benchmark: a row's "op" says which."""

from __future__ import annotations

from tilewise.bench.operations.decode_step import DecodeStep
from tilewise.bench.operations.ffn import Ffn
from tilewise.bench.operations.gemm import Gemm
from tilewise.bench.operations.layer import Layer
from tilewise.bench.operations.masked import MaskedAttention
from tilewise.bench.operations.norm import Norm
from tilewise.bench.operations.operation import Operation
from tilewise.bench.operations.rope import Rope

OPERATIONS: dict[str, type[Operation]] = {
    kind.op: kind for kind in (Gemm, Ffn, Norm, Rope, Layer, DecodeStep, MaskedAttention)
}

__all__ = ["OPERATIONS", "Operation"]
