"""What the scripts of examples/vit say of missing or damaged files, wrong options and full disks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vit_example import SMALL


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
