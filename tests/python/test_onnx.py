"""tilewise.integrations.onnx: exported models give in onnxruntime what they give in PyTorch."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest
import tilewise
import torch
from torch import Tensor

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

from tilewise.integrations import onnx  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

B, HQ, HKV, SQ, SK, D, DV = 2, 4, 2, 5, 7, 8, 6


class Attend(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Any:
        return tilewise.attention(q, k, v, mask, enable_gqa=True, **self.options)


def rows() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, HQ, SQ, D), torch.randn(B, HKV, SK, D), torch.randn(B, HKV, SK, DV)


def run(path: Path, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    session = onnxruntime.InferenceSession(path)
    feed = {x.name: given.numpy() for x, given in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(x) for x in session.run(None, feed)]


def check(model: torch.nn.Module, inputs: tuple[Tensor, ...], path: Path, **options: Any) -> list[str]:
    """Compares, and returns the kinds of the graph's nodes."""
    program = onnx.export(model.eval(), inputs, path, verbose=False, **options)
    torch.testing.assert_close(run(path, inputs)[0], model(*inputs), atol=1e-5, rtol=1e-5)
    return [node.op_type for node in program.model.graph]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 1.5},
    "softcap and causal": {"softcap": 1.5, "is_causal": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_the_operator_has(name: str, tmp_path: Path) -> None:
    assert check(Attend(**OPTIONS[name]), rows(), tmp_path / "model.onnx") == ["Attention"]


def test_the_node_is_one_that_tensorrts_parser_takes(tmp_path: Path) -> None:
    """It refuses nodes with a second output, past keys or past values."""
    mask = torch.randn(SQ, SK)
    program = onnx.export(Attend(is_causal=True), (*rows(), mask), tmp_path / "model.onnx", verbose=False)
    (node,) = (node for node in program.model.graph if node.op_type == "Attention")
    assert len(node.outputs) == 1 and len(node.inputs) == 4


@pytest.mark.parametrize("shape", [(SQ, SK), (SK,), (B, 1, 1, SK), (HQ, SQ, 1), (B, HQ, SQ, SK)], ids=str)
@pytest.mark.parametrize("boolean", [False, True])
def test_masks_of_any_shape(shape: tuple[int, ...], boolean: bool, tmp_path: Path) -> None:
    mask = torch.randn(shape)
    mask = mask > -1 if boolean else mask
    options = {"softcap": 2.0, "is_causal": True} if len(shape) == 2 else {}
    kinds = check(Attend(**options), (*rows(), mask), tmp_path / "model.onnx")
    assert kinds.count("Attention") == 1


LAYERS: dict[str, Any] = {
    "attention": lambda: tilewise.nn.Attention(32, 4, num_kv_heads=2, is_causal=True),
    "multihead attention": lambda: SelfAttention(),
}


class SelfAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = tilewise.nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_dynamic_shapes(name: str, tmp_path: Path) -> None:
    layer, path = LAYERS[name](), tmp_path / "model.onnx"
    shapes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length")},)
    kinds = check(layer, (torch.randn(2, 10, 32),), path, dynamic_shapes=shapes)
    assert kinds.count("Attention") == 1
    other = torch.randn(3, 17, 32)
    torch.testing.assert_close(run(path, (other,))[0], layer(other), atol=1e-5, rtol=1e-5)


def test_a_program_exported_by_torch_and_torchs_own_exporter(tmp_path: Path) -> None:
    inputs, path = rows(), tmp_path / "model.onnx"
    model = Attend(is_causal=True).eval()
    onnx.export(torch.export.export(model, inputs), path=path, verbose=False)
    torch.testing.assert_close(run(path, inputs)[0], model(*inputs), atol=1e-5, rtol=1e-5)
    table = onnx.translation_table()
    torch.onnx.export(
        model, inputs, path, dynamo=True, opset_version=23, custom_translation_table=table, verbose=False
    )
    torch.testing.assert_close(run(path, inputs)[0], model(*inputs), atol=1e-5, rtol=1e-5)


REFUSED: dict[str, dict[str, Any]] = {
    "dropout_p": {"dropout_p": 0.5},
    "alignment": {"is_causal": True, "alignment": "bottom_right"},
    "window": {"window": (3, 0)},
    "window ": {"window": (None, 2)},
    "alibi_slopes": {"alibi_slopes": torch.ones(HQ)},
    "sinks": {"sinks": torch.ones(HQ)},
    "logit_scale": {"logit_scale": torch.ones(HQ)},
    "return_lse": {"return_lse": True},
    "block_mask": {
        "block_mask": tilewise.BlockMask.from_dense(torch.rand(1, 1, SQ, SK) < 0.5, block_size=4),
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_operator_does_not_express_raises_with_the_reason(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with pytest.raises(tilewise.Unsupported, match=f"^{name.strip()}: ONNX's Attention"):
        onnx.export(Attend(**REFUSED[name]), rows(), path, verbose=False)
    assert not path.exists()


class Packed(torch.nn.Module):
    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return tilewise.attention_varlen(x, x, x, ends, ends, 6, 6)


class Cached(torch.nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return tilewise.attention_decode(x, x, x, lengths)


def test_other_layouts_raise_with_the_reason() -> None:
    ends = torch.tensor([0, 4, 10], dtype=torch.int32)
    with pytest.raises(tilewise.Unsupported, match=r"^cu_seqlens_q: "):
        onnx.export(Packed(), (torch.randn(10, 2, 8), ends))
    with pytest.raises(tilewise.Unsupported, match=r"^cache_seqlens: "):
        onnx.export(Cached(), (torch.randn(2, 2, 10, 8), ends[1:]))


def test_an_older_opset_is_refused() -> None:
    with pytest.raises(tilewise.InvalidArgument, match="opset_version: expected at least 23"):
        onnx.export(Attend(), rows(), opset_version=22)


def test_examples_in_docstrings_run() -> None:
    found = doctest.testmod(onnx)
    assert found.failed == 0 and found.attempted > 0
