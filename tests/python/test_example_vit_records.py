"""What examples/vit records: epochs and steps of training, inference, and time by the size of images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_record_has_epochs_and_steps(vit: Any, folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    small = vit.model.ViTConfig(28, 7, 1, 10, 24, 1, 2)
    monkeypatch.setattr(vit.record, "config_for", lambda images, patch, **sizes: small)
    monkeypatch.setattr(vit.record, "TURN_SECONDS", 0.02)
    given = ["--data", str(folder), "--device", "cpu", "--epochs", "1", "--steps", "5", "--batch", "32"]
    vit.record.main([*given, "--images", "64", "--out", str(tmp_path)])
    (path,) = tmp_path.rglob("vit-train.jsonl")
    first, *lines, last = lines_of(path)
    assert first["environment"]["device"] == "cpu" and "finished" in last
    assert {(x["op"], x["impl"]) for x in lines} >= {("epoch", "auto"), ("epoch", "sdpa"), ("steps", "simd")}
    said = {"data": "Fashion-MNIST", "training_images": 64, "test_images": 200, "epochs": 1}
    assert all(x.items() >= said.items() for x in lines)
    steps = {x["impl"]: x for x in lines if x["op"] == "steps"}
    assert steps["simd"]["steps"] == 5 and steps["simd"]["timed"] == 2
    assert steps["simd"]["loss"] == pytest.approx(steps["sdpa"]["loss"], rel=1e-2)
    both = {"forward": "simd", "backward": "simd"}
    assert steps["auto"]["kernels"] == steps["simd"]["kernels"] == both
    assert steps["sdpa"]["kernels"] == {"forward": "sdpa", "backward": "sdpa"}
    infers = {x["impl"]: x for x in lines if x["op"] == "infer"}
    assert infers["auto"]["kernels"] == both
    assert all(x["turns"] == 5 and x["images_a_second"] > 0 and x["spread"] >= 0 for x in infers.values())
    with pytest.raises(SystemExit):
        vit.record.main([*given, "--steps", "3"])


def test_a_refusal_is_recorded_and_a_fault_is_not(
    vit: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = vit.data.load(folder)[0].first(32)
    config = vit.model.ViTConfig(28, 7, 1, 10, 24, 1, 2)
    settings = vit.train.Settings(epochs=5, batch=32)
    tilewise = vit.record.tilewise

    def steps(error: Exception, kernel: str = "simd") -> dict[str, Any]:
        def fail(*given: Any) -> float:
            raise error

        monkeypatch.setattr(vit.record, "train_epoch", fail)
        return vit.record.few_steps(config, train, settings, 5, kernel, {})

    said = "kernel 'simd' cannot take this problem (backward f32):\n  simd: has no backward"
    for refusal in (
        tilewise.Unsupported(said),
        RuntimeError(f"tilewise.Unsupported: {said}"),
        RuntimeError(said),
    ):
        assert steps(refusal)["skipped"] == "has no backward"
    assert steps(tilewise.Unsupported("no kernel"), "auto")["skipped"] == "no kernel"
    for fault in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        tilewise.DeviceError("an illegal memory access was encountered"),
        RuntimeError("expected scalar type Float but found BFloat16"),
    ):
        with pytest.raises(type(fault)):
            steps(fault)


def test_inference_is_recorded_in_turns(vit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    rates = {"auto": iter((90.0, 100.0, 110.0, 104.0, 96.0)), "sdpa": iter((50.0,) * 5)}

    def rate(model: Any, *given: Any) -> float:
        turns.append(model)
        return next(rates[model])

    monkeypatch.setattr(vit.record, "images_a_second", rate)
    found = vit.record.inference_rates({"auto": "auto", "sdpa": "sdpa"}, None, None)
    assert turns == ["auto", "sdpa", "sdpa", "auto"] * 2 + ["auto", "sdpa"]
    assert found == {
        "auto": {"images_a_second": 100, "spread": 0.08, "turns": 5},
        "sdpa": {"images_a_second": 50, "spread": 0.0, "turns": 5},
    }


def test_scaling_times_attention_and_model(vit: Any, tmp_path: Path) -> None:
    given = ["--pixels", "32,48", "--depth", "1", "--batch", "1", "--dtype", "f32", "--seconds", "0.02"]
    vit.scaling.main([*given, "--device", "cpu", "--out", str(tmp_path)])
    (path,) = tmp_path.rglob("vit-model.jsonl")
    _, *lines, _ = lines_of(path)
    assert {(x["op"], x["impl"], x["tokens"]) for x in lines} >= {
        ("vit attention", "simd", 5), ("vit model", "torch", 10), ("vit model", "torch + auto", 5)
    }  # fmt: skip
    assert all(x["ms"] > 0 and x["runs"] >= 3 and x["sets"] == 1 for x in lines)


def test_scaling_says_why_a_kernel_does_not_run(vit: Any) -> None:
    device = torch.device("cpu")
    model = vit.scaling.base_16(32, 1, device)
    calls, reasons = vit.scaling.attention_calls(model, 1, torch.float32, device, ["auto", "naive"])
    assert "auto" in calls and "naive" not in calls
    assert reasons["naive"] and not reasons["naive"].endswith(":")


def test_scaling_rotates_inputs(vit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(vit.scaling, "sets_for", lambda size, device: asked.append(size) or 3)
    device = torch.device("cpu")
    model = vit.scaling.base_16(32, 1, device)
    calls, _ = vit.scaling.attention_calls(model, 2, torch.float32, device, ["auto"])
    assert asked == [2 * 5 * 3 * 768 * 4]
    ours, theirs = ([call() for call in calls[name]] for name in ("auto", "torch"))
    assert len(ours) == 3 and not torch.allclose(ours[0], ours[1], atol=1e-2)
    for left, right in zip(ours, theirs, strict=True):
        assert torch.allclose(left, right, atol=1e-5)
    found = vit.scaling.times(calls, device, runs=3, seconds=0.0)
    assert {name: x["sets"] for name, x in found.items()} == {"auto": 3, "torch": 3}


def test_scalings_models_agree(vit: Any) -> None:
    model = vit.scaling.base_16(32, 1, torch.device("cpu"))
    x = torch.randn(2, 3, 32, 32)
    other = vit.scaling.pytorchs(vit.scaling.with_attention(model, "sdpa"))
    assert not any(type(part) in vit.scaling.PYTORCHS for part in other.modules())
    assert torch.allclose(model(x), other(x), atol=1e-5)
    assert torch.allclose(model(x), vit.scaling.with_attention(model, "layer")(x), atol=1e-5)
