"""Trains a small GPT on text, character by character: python examples/gpt/train.py [--text FILE] [--steps N]

The text is the prose of this repository's own documents, unless a file is given. Two models start from the
same weights and see the same batches: one on tilewise.nn, the other on PyTorch's operations with SDPA (which
--alone leaves out). Their losses are printed side by side and drawn in OUT/loss.svg; then the first model
writes some text. Minutes on a CPU.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

try:
    import tilewise
except ImportError as error:
    raise SystemExit(f"{error}: run `pip install .` in the checkout, where torch is installed") from None
import torch
import torch.nn.functional as F
from model import GPT, TorchLayer
from tilewise.bench import environment
from tilewise.bench.charts import Chart, Series, axis, grid, standalone
from tilewise.bench.options import number, whole
from tilewise.bench.problem import BadInput
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
HELD_OUT = 0.1  # of the text, its end: for the loss on text that no step has seen
EVALUATED = 16  # batches of it
ROWS = 16  # of the table


@dataclass(frozen=True)
class Corpus:
    """Characters as numbers, int64 [N]: to train on, and to judge by."""

    characters: str
    train: Tensor
    held_out: Tensor

    @classmethod
    def of(cls, text: str) -> Corpus:
        characters = "".join(sorted(set(text)))
        numbers = {character: n for n, character in enumerate(characters)}
        tokens = torch.tensor([numbers[character] for character in text])
        kept = int(len(tokens) * (1 - HELD_OUT))
        return cls(characters, tokens[:kept], tokens[kept:])

    def tokens(self, text: str) -> Tensor:
        """[1, S]; characters that the corpus does not have are left out."""
        return torch.tensor([[self.characters.index(x) for x in text if x in self.characters]])

    def text(self, tokens: Tensor) -> str:
        return "".join(self.characters[n] for n in tokens.tolist())


def prose(page: str) -> str:
    """A Markdown page without code, tables, comments and the breaks inside of paragraphs."""
    page = re.sub(r"^```.*?^```$|<!--.*?-->", "", page, flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in page.splitlines() if not line.startswith(("|", "!["))]
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines))
    return "\n".join(" ".join(x.split()) for x in paragraphs if x.strip()) + "\n"


def read_text(path: Path | None) -> str:
    if path is not None:
        try:
            return path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"--text: cannot read {path}: {error}") from None
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [prose(page.read_text()) for page in pages if page.exists()]
    if not found:
        raise BadInput("--text: expected a file, as there is no folder docs beside examples")
    return "".join(found)


def batch_of(tokens: Tensor, length: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows of the text [count, length], and the same one character later."""
    starts = torch.randint(len(tokens) - length, (count, 1), generator=generator)
    rows = tokens[starts + torch.arange(length + 1)]
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def make_models(corpus: Corpus, asked: argparse.Namespace) -> dict[str, GPT]:
    """By name; all with the same weights."""
    sizes = {"positions": 2 * asked.length, "dim": asked.dim, "depth": asked.depth, "heads": asked.heads}
    torch.manual_seed(asked.seed)
    models = {"Tilewise": GPT(len(corpus.characters), **sizes)}
    if not asked.alone:
        models["SDPA"] = GPT(len(corpus.characters), **sizes, layer=TorchLayer)
        models["SDPA"].load_state_dict(models["Tilewise"].state_dict())
    return models


@torch.inference_mode()
def held_out_loss(model: GPT, corpus: Corpus, asked: argparse.Namespace, device: torch.device) -> float:
    generator = torch.Generator().manual_seed(asked.seed)
    total = 0.0
    for _ in range(EVALUATED):
        rows = batch_of(corpus.held_out, asked.length, asked.batch, generator)
        total += loss_of(model, *(x.to(device) for x in rows)).item()
    return total / EVALUATED


def fit(
    models: dict[str, GPT], corpus: Corpus, asked: argparse.Namespace, device: torch.device
) -> dict[str, list[float]]:
    """The loss of every step of each model. Prints a table of means over some steps."""
    generator = torch.Generator().manual_seed(asked.seed)
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=asked.lr, weight_decay=0.1)
        for name, model in models.items()
    }
    losses: dict[str, list[float]] = {name: [] for name in models}
    every = max(1, asked.steps // ROWS)
    print("step " + "".join(f"{name:>10}" for name in models) + "   seconds", flush=True)
    begin = time.perf_counter()
    for step in range(1, asked.steps + 1):
        rows = [x.to(device) for x in batch_of(corpus.train, asked.length, asked.batch, generator)]
        rate = asked.lr * min(1.0, step / (0.05 * asked.steps)) * (1.02 - step / asked.steps)
        for name, model in models.items():
            optimizers[name].param_groups[0]["lr"] = rate
            loss = loss_of(model, *rows)
            optimizers[name].zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizers[name].step()
            losses[name].append(loss.item())
        seconds = time.perf_counter() - begin
        if step % every == 0 or step == asked.steps:
            means = "".join(f"{sum(x[-every:]) / len(x[-every:]):10.4f}" for x in losses.values())
            print(f"{step:4d} {means}   {seconds:7.0f}", flush=True)
        elif sys.stderr.isatty():
            left = seconds / step * (asked.steps - step)
            print(
                f"\rstep {step}/{asked.steps}, {left:.0f} s left\033[K\r", end="", file=sys.stderr, flush=True
            )
    return losses


def picture(losses: dict[str, list[float]]) -> str:
    """The curves as SVG, smoothed over twentieths of the way."""
    curves = {}
    for name, of in losses.items():
        size = max(1, len(of) // 20)
        ends = range(size, len(of) + 1, size)
        curves[name] = tuple((float(end), sum(of[end - size : end]) / size) for end in ends)
    points = [point for curve in curves.values() for point in curve]
    chart = Chart(
        title="loss, nats per character",
        x=axis("step", [x for x, _ in points], log=False),
        y=axis("loss", [y for _, y in points], log=False),
        series=tuple(Series(name, curve, dashed=name == "SDPA") for name, curve in curves.items()),
    )
    return standalone(grid([chart], 1, list(curves), cell=(560, 320)))


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", type=Path, help="a file to learn from, in place of the documents")
    parser.add_argument("--out", type=Path, default=Path("build/gpt"), help="folder of loss.svg")
    parser.add_argument("--alone", action="store_true", help="without the model on SDPA")
    parser.add_argument("--device", help="cuda where there is a GPU, else cpu")
    parser.add_argument("--prompt", default="Tilewise ", help="how the text begins that the model writes")
    parser.add_argument("--temperature", type=number(0.01), default=0.6)
    for name, least, default in (
        *(("steps", 1, 250), ("batch", 1, 16), ("length", 2, 128)),
        *(("dim", 2, 128), ("depth", 1, 4), ("heads", 1, 4), ("seed", 0, 0)),
    ):
        parser.add_argument(f"--{name}", type=whole(least), default=default)
    parser.add_argument("--lr", type=number(0), default=3e-3)
    return parser.parse_args(given)


def run(asked: argparse.Namespace) -> None:
    device = environment.choose_device(asked.device)
    text = read_text(asked.text)
    corpus = Corpus.of(text)
    if len(corpus.held_out) <= asked.length:
        raise BadInput(
            f"--text: expected more than {int(asked.length / HELD_OUT)} characters, got {len(text)}"
        )
    try:
        asked.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out: cannot make {asked.out}: {error.strerror}") from None
    models = {name: model.to(device) for name, model in make_models(corpus, asked).items()}
    count = sum(p.numel() for p in models["Tilewise"].parameters())
    print(f"{len(text):,} characters, {len(corpus.characters)} different ones; {count:,} weights; {device}")
    losses = fit(models, corpus, asked, device)
    for name, model in models.items():
        print(f"{name}: loss {held_out_loss(model, corpus, asked, device):.4f} on text that was held out")
    (asked.out / "loss.svg").write_text(picture(losses))
    print(f"curves: {asked.out / 'loss.svg'}\n")
    prompt = corpus.tokens(asked.prompt)
    if prompt.numel() == 0:
        prompt = corpus.tokens("\n")
    drawn = models["Tilewise"].sample(
        prompt.to(device), 2 * asked.length - prompt.shape[1], asked.temperature, asked.seed
    )
    print(asked.prompt + corpus.text(drawn[0].cpu()))


def main(given: list[str] | None = None) -> None:
    asked = arguments(given)
    try:
        run(asked)
    except KeyboardInterrupt:
        raise SystemExit("\ninterrupted") from None
    except (BadInput, tilewise.Error) as reason:
        raise SystemExit(str(reason)) from None


if __name__ == "__main__":
    main()
