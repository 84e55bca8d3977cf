"""examples/vit: it learns, with Tilewise as with PyTorch's attention; and what its scripts say."""

from __future__ import annotations

import gzip
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "vit"
MODULES = ("model", "data", "weights", "train", "infer", "record", "scaling")
SMALL = ["--patch", "7", "--dim", "48", "--depth", "2", "--heads", "3", "--device", "cpu"]
DEBIANS = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture
def vit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's modules; other examples have some of the same names."""
    if not EXAMPLE.exists():
        pytest.skip("a staged tree has no examples")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what is this small is slower with more
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        del sys.modules[name]
    torch.set_num_threads(threads)


def images(count: int, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Images that can be told apart: a pattern of 4 x 4 for each class, under noise."""
    generator = torch.Generator().manual_seed(7)
    patterns = torch.rand(classes, 4, 4, generator=generator).round()
    patterns = patterns.repeat_interleave(7, 1).repeat_interleave(7, 2)
    labels = torch.randint(classes, (count,))
    pixels = (160 * patterns[labels] + 95 * torch.rand(count, 28, 28)).to(torch.uint8)
    return pixels, labels


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small set in Fashion-MNIST's files."""
    for part, count in (("train", 640), ("t10k", 200)):
        pixels, labels = images(count)
        for kind, magic, shape, content in (
            ("images-idx3", 3, (count, 28, 28), pixels),
            ("labels-idx1", 1, (count,), labels.to(torch.uint8)),
        ):
            header = bytes((0, 0, 8, magic)) + b"".join(n.to_bytes(4, "big") for n in shape)
            path = tmp_path / f"{part}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(header + bytes(content.flatten().tolist())))
    return tmp_path


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
            if text == stop:
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


def test_what_is_missing_is_said_in_a_line(vit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.setattr(vit.data, "FASHION_MNIST", tmp_path / "nowhere")
    cases = [
        (vit.train.main, [], "apt-get install dataset-fashion-mnist"),
        (vit.train.main, ["--data", str(tmp_path)], "test_batch.bin"),
        (vit.infer.main, ["--weights", str(tmp_path / "none.safetensors")], "train.py makes them"),
        (vit.record.main, ["--device", "cpu"], "apt-get install dataset-fashion-mnist"),
    ]
    for main, arguments, message in cases:
        with pytest.raises(SystemExit, match=message) as caught:
            main(arguments)
        assert "\n" not in str(caught.value)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="pip install safetensors"):
        patch.setattr(vit.weights.importlib.util, "find_spec", lambda name: None)
        vit.train.main(["--device", "cpu"])
    (tmp_path / "bad.safetensors").write_bytes(b"no weights")
    with pytest.raises(SystemExit, match=r"expected weights that train\.py saved"):
        vit.infer.main(["--weights", str(tmp_path / "bad.safetensors"), "--device", "cpu"])
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(b"not gzip")
    with pytest.raises(SystemExit, match="cannot read it"):
        vit.train.main(["--data", str(tmp_path), "--device", "cpu"])


def one_line(main: Any, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message) as caught:
        main(arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["cut off", "a byte", "no gzip", "no images", "other sizes"])
def test_damaged_data_is_one_line(vit: Any, folder: Path, damage: str) -> None:
    path = folder / "train-images-idx3-ubyte.gz"
    content = path.read_bytes()
    labels = folder / "train-labels-idx1-ubyte.gz"
    if damage == "no images":
        labels.write_bytes(gzip.compress(bytes((0, 0, 8, 1, 0, 0, 0, 0))))
    header = bytes((0, 0, 8, 3))
    sizes = {"no images": (0, 28, 28), "other sizes": (640, 14, 14)}.get(damage, ())
    header += b"".join(n.to_bytes(4, "big") for n in sizes)
    damaged = {
        "cut off": content[: len(content) // 2],
        "a byte": content[:10] + b"\xff" * 20 + content[30:],  # after the header, where zlib reads
        "no gzip": b"x" * 100,
        "no images": gzip.compress(header),
        "other sizes": gzip.compress(header + bytes(640 * 14 * 14)),
    }
    path.write_bytes(damaged[damage])
    message = {
        "no images": "expected square images, train has 0 of 28 x 28",
        "other sizes": "to train on are 1 x 14 x 14, to test on 1 x 28 x 28",
    }.get(damage, r"train-images-idx3-ubyte\.gz: cannot read it")
    one_line(vit.train.main, ["--data", str(folder), "--device", "cpu"], message)


def saved(vit: Any, path: Path, size: int = 28, channels: int = 1) -> list[str]:
    """Weights of a small model for such images, as options of infer.py."""
    config = vit.model.ViTConfig(size, 7, channels, 5, 24, 1, 2)
    vit.weights.save(path, vit.model.ViT(config))
    return ["--weights", str(path), "--device", "cpu"]


def test_weights_for_other_images_are_one_line(
    vit: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("safetensors")
    monkeypatch.setattr(vit.model.ViT, "forward", lambda *given: pytest.fail("ran"))
    given = saved(vit, tmp_path / "cifar.safetensors", size=32, channels=3)
    message = "--data: the weights are for images of 3 x 32 x 32, and these are 1 x 28 x 28"
    one_line(vit.infer.main, [*given, "--data", str(folder)], message)


@pytest.mark.parametrize("damage", ["missing", "more", "shape", "config"])
def test_wrong_weights_are_one_line(vit: Any, folder: Path, tmp_path: Path, damage: str) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "wrong.safetensors"
    given = saved(vit, path)
    tensors = safetensors.load_file(path)
    config = {
        "image_size": 28,
        "patch_size": 7,
        "channels": 1,
        "classes": 5,
        "dim": 24,
        "depth": 1,
        "heads": 2,
    }
    if damage == "missing":
        del tensors["norm.weight"]
    elif damage == "more":
        tensors["odd"] = torch.ones(3)
    elif damage == "shape":
        tensors["norm.weight"] = torch.ones(12)
    else:
        config["heads"] = 0
    safetensors.save_file(tensors, path, metadata={"config": json.dumps(config)})
    message = {
        "missing": r"of norm\.weight expected \[24\], got none",
        "more": r"of odd expected none, got \[3\]",
        "shape": r"of norm\.weight expected \[24\], got \[12\]",
        "config": "heads is 0",
    }[damage]
    one_line(vit.infer.main, [*given, "--data", str(folder)], rf"wrong\.safetensors: .*{message}")


@pytest.mark.parametrize(
    "given",
    [
        *(("train", name, "0") for name in ("--batch", "--images", "--patch", "--dim", "--depth", "--heads")),
        *(("train", name, "-1") for name in ("--epochs", "--batch", "--images", "--seed", "--lr")),
        *(("infer", "--batch", "0"), ("infer", "--seconds", "-1"), ("train", "--lr", "nan")),
        *(("record", name, "-1") for name in ("--epochs", "--steps", "--batch", "--images")),
        *(("record", "--steps", "3"), ("scaling", "--pixels", "224,8"), ("scaling", "--pixels", "big")),
        *(("scaling", "--batch", "0"), ("scaling", "--dtype", "f8"), ("scaling", "--depth", "0")),
    ],
    ids=" ".join,
)
def test_bad_options_are_named(vit: Any, given: tuple[str, str, str], capsys: Any) -> None:
    script, name, value = given
    with pytest.raises(SystemExit) as caught:
        getattr(vit, script).main([f"{name}={value}"])
    error = capsys.readouterr().err
    assert caught.value.code == 2 and f"{name}: expected " in error
    assert error.splitlines()[-1].endswith(value.split(",")[-1]) or repr(value.split(",")[-1]) in error


def test_what_cannot_be_is_one_line(vit: Any, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    given = ["--data", str(folder), "--device", "cpu"]
    (tmp_path / "file").write_text("no folder")
    below = ["--out", str(tmp_path / "file" / "below")]
    for script in (vit.train, vit.infer, vit.record, vit.scaling):
        one_line(script.main, ["--device", "tpu"], "--device: expected cpu or cuda, got 'tpu'")
    one_line(vit.train.main, [*given, *below], "--out: cannot make ")
    one_line(vit.record.main, [*given, *below], "--out: cannot write ")
    one_line(vit.scaling.main, ["--device", "cpu", *below], "--out: cannot write ")
    for script, patch in ((vit.train, "29"), (vit.train, "5"), (vit.record, "5")):
        out = ["--out", str(tmp_path / "out")]
        message = f"--patch: expected a divisor of 28, the side of an image, got {patch}"
        one_line(script.main, [*given, *out, "--patch", patch], message)
    one_line(
        vit.train.main,
        [*given, "--dim", "50", "--heads", "3"],
        "embed_dim: expected a multiple of num_heads 3",
    )
    one_line(
        vit.scaling.main, ["--device", "cpu", "--kernels", "odd"], "--kernels: expected auto, .*got 'odd'"
    )


@pytest.mark.parametrize("reason", ["full disk", "interrupt", "safetensors"])
def test_weights_that_cannot_be_written_are_one_line(
    vit: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, reason: str
) -> None:
    safetensors = pytest.importorskip("safetensors")
    out = tmp_path / "out"
    given = ["--data", str(folder), "--out", str(out), "--epochs", "1", "--images", "32", *SMALL]
    vit.train.main(given)
    before = (out / "auto.safetensors").read_bytes()
    error, message = {
        "full disk": (OSError(28, "No space left on device"), r"^--out: cannot write .*: No space left"),
        "safetensors": (safetensors.SafetensorError("I/O error"), r"^--out: cannot write .*: I/O error"),
        "interrupt": (KeyboardInterrupt(), "interrupted: the same command goes on"),
    }[reason]

    def half(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(before[: len(before) // 2])
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", half)
        with pytest.raises(SystemExit, match=message) as caught:
            vit.train.main(given)
    assert "\n" not in str(caught.value).strip()
    assert (out / "auto.safetensors").read_bytes() == before
    names = {path.name for path in out.iterdir()}
    assert names == {"auto.safetensors", "auto.checkpoint.pt"}
    vit.train.main(given)
    assert (out / "auto.safetensors").read_bytes() == before
    capsys.readouterr()


def test_a_checkpoint_that_cannot_be_written_is_one_line(
    vit: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: Any) -> None:
        raise OSError(28, "No space left on device")

    pytest.importorskip("safetensors")
    monkeypatch.setattr(Path, "write_bytes", full)
    given = ["--data", str(folder), "--out", str(tmp_path / "out"), "--epochs", "1", "--images", "32", *SMALL]
    one_line(vit.train.main, given, r"^--out: cannot write .*checkpoint\.pt: No space left on device")


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


def test_a_checkpoint_is_of_its_images(vit: Any, folder: Path, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("safetensors")
    out = tmp_path / "out"
    given = ["--data", str(folder), "--out", str(out), "--epochs", "1", "--batch", "32", *SMALL]
    vit.train.main([*given, "--images", "64"])
    vit.train.main([*given, "--images", "64"])
    assert "going on after epoch 1" in capsys.readouterr().out
    one_line(vit.train.main, [*given, "--images", "96"], "was made with images 64, and here it is 96")
    one_line(vit.train.main, given, "was made with images 64, and here it is 640")
    checkpoint = out / "auto.checkpoint.pt"
    state = torch.load(checkpoint, weights_only=True)
    del state["settings"]["images"]
    torch.save(state, checkpoint)
    one_line(vit.train.main, given, "does not say of what images it was made")
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    one_line(vit.train.main, given, r"auto\.checkpoint\.pt: no checkpoint of train\.py")


def test_cifar_is_read_from_its_records(vit: Any, tmp_path: Path) -> None:
    records = torch.randint(256, (12, 3073), dtype=torch.uint8)
    records[:, 0] %= 10
    for n, name in enumerate((*vit.data.CIFAR_TRAIN, *vit.data.CIFAR_TEST)):
        (tmp_path / name).write_bytes(bytes(records[2 * n : 2 * n + 2].flatten().tolist()))
    train, test = vit.data.load(tmp_path)
    assert train.pixels.shape == (10, 3, 32, 32) and test.labels.tolist() == records[10:, 0].tolist()
    assert train.pixels[3, 1, 4, 5] == records[3, 1 + 1024 + 4 * 32 + 5]
    assert vit.train.config_for(train).channels == 3
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


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_record_has_epochs_and_steps(vit: Any, folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    small = vit.model.ViTConfig(28, 7, 1, 10, 24, 1, 2)
    monkeypatch.setattr(vit.record, "config_for", lambda images, patch: small)
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
