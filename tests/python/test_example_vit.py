"""examples/vit: it learns, with Tilewise as with PyTorch's attention; its data, checkpoints and scripts."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vit_example import SMALL

DEBIANS = Path("/usr/share/datasets/fashion-mnist")


def trained(vit: Any, folder: Path | None, attention: str, limit: int, epochs: int, batch: int) -> Any:
    train, test = (x.first(limit) for x in vit.data.load(folder))
    settings = vit.train.Settings(epochs=epochs, batch=batch, lr=2e-3, seed=3)
    config = vit.train.config_for(train, patch=7, dim=48, depth=2, heads=3)
    model = vit.train.make_model(config, attention, settings.seed, torch.device("cpu"))
    begin = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    history = vit.train.fit(model, train, test, settings, say=lambda text, kept: None)
    return SimpleNamespace(begin=begin, losses=[x["loss"] for x in history], right=history[-1]["accuracy"])


def check_learns(ours: Any, theirs: Any, least: float) -> None:
    for name in ours.begin:
        assert torch.equal(ours.begin[name], theirs.begin[name]), f"{name} begins differently"
    # The same images in the same order: what differs in the first epoch is rounding.
    assert ours.losses[0] == pytest.approx(theirs.losses[0], rel=1e-3)
    assert ours.right > least and theirs.right > least
    assert ours.right == pytest.approx(theirs.right, abs=0.05)


def test_learns_as_with_pytorchs_attention(vit: Any, folder: Path) -> None:
    ours, theirs = (trained(vit, folder, name, 640, epochs=7, batch=32) for name in ("auto", "sdpa"))
    check_learns(ours, theirs, least=0.8)


def test_learns_fashion_mnist(vit: Any) -> None:
    if not DEBIANS.exists():
        pytest.skip("Fashion-MNIST is not here: Debian's package dataset-fashion-mnist")
    ours, theirs = (trained(vit, None, name, 2048, epochs=4, batch=32) for name in ("auto", "sdpa"))
    check_learns(ours, theirs, least=0.55)


def test_an_interrupted_training_ends_as_if_it_had_not_been(vit: Any, folder: Path, tmp_path: Path) -> None:
    train, test = (x.first(64) for x in vit.data.load(folder))
    settings = vit.train.Settings(epochs=3, batch=16)
    config = vit.train.config_for(train, patch=7, dim=24, depth=1, heads=2)

    def fit(checkpoint: Path | None, stop: str | None = None) -> Any:
        def say(text: str, kept: bool) -> None:
            if stop and text.startswith(stop):
                raise KeyboardInterrupt

        model = vit.train.make_model(config, "auto", 0, torch.device("cpu"))
        vit.train.fit(model, train, test, settings, checkpoint, say)
        return model

    whole, checkpoint = fit(None), tmp_path / "last.pt"
    with pytest.raises(KeyboardInterrupt):
        fit(checkpoint, stop="epoch 2/3, step 2/4")
    resumed = fit(checkpoint)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    with pytest.raises(vit.data.Missing, match=r"was made with epochs 3, and here it is 5"):
        other = vit.train.Settings(epochs=5, batch=16)
        vit.train.fit(
            vit.train.make_model(config, "auto", 0, torch.device("cpu")), train, test, other, checkpoint
        )


def test_scripts_train_then_infer(vit: Any, folder: Path, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("safetensors")
    out = tmp_path / "out"
    vit.train.main(["--data", str(folder), "--out", str(out), "--epochs", "2", "--batch", "64", *SMALL])
    said = capsys.readouterr().out
    assert "epoch 2/2" in said and "auto.safetensors" in said
    path, data = ["--weights", str(out / "auto.safetensors")], ["--data", str(folder), "--device", "cpu"]
    accuracies = []
    for attention in ("auto", "sdpa"):
        vit.infer.main([*path, *data, "--attention", attention, "--seconds", "0.1", "--batch", "50"])
        said = capsys.readouterr().out
        assert ("simd: chosen" in said) == (attention == "auto") and "images/s" in said
        accuracies.append(next(line for line in said.splitlines() if line.startswith("accuracy")))
    assert accuracies[0] == accuracies[1]
    with pytest.raises(SystemExit, match=r"kernel: .*expected.*nonsense"):
        vit.infer.main([*path, *data, "--attention", "nonsense"])


def test_inference_works_at_once(
    vit: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the weights and the images in the repository; how right they are, docs/models.md says."""
    pytest.importorskip("safetensors")
    assert vit.weights.TRAINED.stat().st_size < 1_000_000
    monkeypatch.setattr(vit.data, "FASHION_MNIST", tmp_path / "nowhere")
    found = {}
    for attention in ("auto", "sdpa"):
        vit.infer.main(["--device", "cpu", "--attention", attention, "--seconds", "0.1", "--show", "3"])
        said = capsys.readouterr().out
        assert "apt-get install dataset-fashion-mnist for all 10,000" in said
        assert "image 0: ankle boot" in said and "image 3" not in said
        found[attention] = float(said.split("accuracy: ")[1].split("%")[0])
    assert found["auto"] == found["sdpa"] and found["auto"] >= 85.0


def test_half_saves_weights_of_half_the_size(vit: Any, folder: Path, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("safetensors")
    given = ["--data", str(folder), "--epochs", "1", "--batch", "64", *SMALL]
    for name, more in (("whole", []), ("half", ["--half"])):
        vit.train.main([*given, "--out", str(tmp_path / name), *more])
    capsys.readouterr()
    whole, half = (tmp_path / name / "auto.safetensors" for name in ("whole", "half"))
    assert half.stat().st_size < 0.6 * whole.stat().st_size
    left, right = (vit.weights.load(path, "auto").state_dict() for path in (whole, half))
    for name in left:
        assert right[name].dtype == torch.float32
        assert torch.equal(left[name].half().float(), right[name]), name


def test_script_trains_in_bf16(vit: Any, folder: Path, tmp_path: Path, capsys: Any) -> None:
    """Attention is bf16 and weights stay f32; it learns as it does in f32, but not to the last bit."""
    pytest.importorskip("safetensors")
    seen: set[torch.dtype] = set()

    def note(module: Any, inputs: Any, output: Any) -> None:
        if isinstance(module, vit.model.tilewise.nn.Attention):
            seen.add(output.dtype)

    losses = {}
    hook = torch.nn.modules.module.register_module_forward_hook(note)
    try:
        for precision, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
            seen.clear()
            out = tmp_path / precision
            given = ["--data", str(folder), "--out", str(out), "--epochs", "3", "--batch", "32"]
            vit.train.main([*given, "--lr", "2e-3", "--precision", precision, *SMALL])
            assert seen == {dtype}
            state = torch.load(out / "auto.checkpoint.pt", weights_only=True)
            assert {tensor.dtype for tensor in state["model"].values()} == {torch.float32}
            losses[precision] = [x["loss"] for x in state["history"]]
    finally:
        hook.remove()
    capsys.readouterr()
    assert losses["bf16"][0] != losses["f32"][0]
    assert losses["bf16"][0] == pytest.approx(losses["f32"][0], rel=2e-2)
    assert losses["bf16"][-1] < 0.8 * losses["bf16"][0]


def test_what_runs_is_explained(vit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's attention, by its shape and strides."""
    seen: list[tuple[Any, Any]] = []

    def noting(call: Any) -> Any:
        def note(q: Tensor, *given: Any, **named: Any) -> Any:
            seen.append((tuple(q.shape), q.stride()))
            return call(q, *given, **named)

        return note

    model = vit.model.ViT(vit.model.ViTConfig(28, 7, 1, 5, 24, 1, 2))
    attention = importlib.import_module("tilewise.nn.attention")
    monkeypatch.setattr(attention, "attention", noting(attention.attention))
    monkeypatch.setattr(vit.infer.tilewise, "explain", noting(vit.infer.tilewise.explain))
    model(torch.randn(3, 1, 28, 28))
    said = vit.infer.explanation(model, "auto", 3, torch.device("cpu"), "f32", gradient=True)
    assert "\nbackward f32 " in said
    assert len(seen) == 2 and seen[0] == seen[1]


def test_cifar_is_read_from_its_records(vit: Any, tmp_path: Path) -> None:
    records = torch.randint(256, (12, 3073), dtype=torch.uint8)
    records[:, 0] %= 10
    for n, name in enumerate((*vit.data.CIFAR_TRAIN, *vit.data.CIFAR_TEST)):
        (tmp_path / name).write_bytes(bytes(records[2 * n : 2 * n + 2].flatten().tolist()))
    train, test = vit.data.load(tmp_path)
    assert train.pixels.shape == (10, 3, 32, 32) and test.labels.tolist() == records[10:, 0].tolist()
    assert train.pixels[3, 1, 4, 5] == records[3, 1 + 1024 + 4 * 32 + 5]
    config = vit.train.config_for(train)
    assert config.channels == 3 and config.patch_size == 8
    assert vit.data.name_of(tmp_path) == "CIFAR-10" and vit.data.name_of(None) == "Fashion-MNIST"
    (tmp_path / "data_batch_3.bin").unlink()
    with pytest.raises(vit.data.Missing, match=r"data_batch_3\.bin"):
        vit.data.load(tmp_path)


def test_augmentation_moves_and_mirrors(vit: Any) -> None:
    pixels = torch.randint(1, 256, (32, 2, 6, 6), dtype=torch.uint8)
    order, moves = vit.data.drawn(32, seed=1, epoch=2, device=pixels.device)
    assert sorted(order.tolist()) == list(range(32))
    assert not torch.equal(order, vit.data.drawn(32, seed=1, epoch=3, device=pixels.device)[0])
    found = vit.data.augmented(pixels, moves)
    padded = torch.nn.functional.pad(pixels, (2, 2, 2, 2))
    seen = set()
    for before, after in zip(padded, found, strict=True):
        crops = {
            (y, x, m): before[:, y : y + 6, x : x + 6] for y in range(5) for x in range(5) for m in (0, 1)
        }
        crops = {key: crop.flip(2) if key[2] else crop for key, crop in crops.items()}
        matching = [key for key, crop in crops.items() if torch.equal(crop, after)]
        assert len(matching) == 1
        seen.add(matching[0])
    assert len(seen) > 8 and {mirrored for *_, mirrored in seen} == {0, 1}
