"""The tree for Hugging Face's kernels package: its metadata, and an import from its folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from programs import load
from tilewise import _binding

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "hub.py"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="a staged tree has no scripts/hub.py")


@pytest.fixture(scope="module")
def hub() -> ModuleType:
    return load("scripts/hub.py")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel holds: this package, and the library that the tests run on."""
    path = tmp_path_factory.mktemp("wheel") / "tilewise-0.1.0-py3-none-any.whl"
    package = Path(_binding.__file__).parent
    with zipfile.ZipFile(path, "w") as archive:
        for source in sorted(package.rglob("*.py")):
            archive.write(source, f"tilewise/{source.relative_to(package)}")
        archive.write(_binding.library_path(), "tilewise/_tilewise.so")
        for name in ("LICENSE", "NOTICE"):
            archive.write(ROOT / name, f"tilewise-0.1.0.dist-info/licenses/{name}")
    return path


def test_variants_are_those_whose_drivers_run_the_binary(
    hub: ModuleType, wheel: Path, tmp_path: Path
) -> None:
    def names(cuda: tuple[int, int] | None, folder: str) -> list[str]:
        return [path.name for path in hub.lay_out(wheel, tmp_path / folder, cuda, None)]

    cpu = "torch-stable-abi210-cpu-x86_64-linux"
    assert names(None, "none") == [cpu]
    assert names((13, 0), "13") == [cpu, "torch-stable-abi210-cu130-x86_64-linux"]
    twelve = ["torch-stable-abi210-cu126-x86_64-linux", "torch-stable-abi210-cu130-x86_64-linux"]
    assert names((12, 8), "12") == [cpu, *twelve]


def test_metadata_names_every_file(hub: ModuleType, wheel: Path, tmp_path: Path) -> None:
    (variant,) = hub.lay_out(wheel, tmp_path, None, "ab" * 20)
    metadata = json.loads((variant / "metadata.json").read_text())
    files = {path.relative_to(variant).as_posix() for path in variant.rglob("*") if path.is_file()}
    assert set(metadata["digest"]["files"]) == files - {"metadata.json"}
    assert {"__init__.py", "LICENSE", "NOTICE", "tilewise/__init__.py", "tilewise/_tilewise.so"} <= files
    assert metadata["provenance"]["kernel"] == {"commit": "ab" * 20, "dirty": False}


def test_the_kernels_package_loads_it_from_a_folder(hub: ModuleType, wheel: Path, tmp_path: Path) -> None:
    (variant,) = hub.lay_out(wheel, tmp_path, None, "ab" * 20)
    run(
        tmp_path,
        f"""
from pathlib import Path
import torch
from kernels import get_local_kernel
from kernels._rust import Digest, DigestAlgorithm, Metadata
variant = Path({str(variant)!r})
expected = Metadata.read_from_file(variant / "metadata.json").digest
expected.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
tilewise = get_local_kernel(Path({str(tmp_path)!r}), backend="cpu")
q = torch.randn(1, 2, 8, 16, requires_grad=True)
tilewise.attention(q, q, q, is_causal=True).sum().backward()
assert q.grad is not None and str(variant) in sys.modules["tilewise"].__file__
assert str(variant) in str(sys.modules["tilewise._binding"].library_path())
""",
    )


MODEL = """
import sys
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
# No token is the last one: a request of a batch has as many as one alone.
config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, **sizes)
model = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
tokens = torch.randint(128, (3, 12))
"""


def test_transformers_attends_by_it(hub: ModuleType, wheel: Path, tmp_path: Path) -> None:
    hub.lay_out(wheel, tmp_path, None, "ab" * 20)
    run(
        tmp_path,
        MODEL
        + """
padding = torch.ones_like(tokens)
padding[0, :5] = 0


def pass_through():
    model.zero_grad()
    logits = model(tokens, attention_mask=padding).logits[padding.bool()]
    logits.square().sum().backward()
    return logits.detach(), [weight.grad.clone() for weight in model.parameters()]


logits, gradients = pass_through()
model.set_attn_implementation("someone/tilewise", allow_all_kernels=True)
ours, our_gradients = pass_through()
torch.testing.assert_close(ours, logits)
torch.testing.assert_close(our_gradients, gradients)
assert "tilewise.integrations.flash_attn" in sys.modules
""",
    )


def test_transformers_batches_requests_by_it(hub: ModuleType, wheel: Path, tmp_path: Path) -> None:
    """Continuous batching takes names with "flash" in them."""
    hub.lay_out(wheel, tmp_path, None, "ab" * 20)
    run(
        tmp_path,
        MODEL
        + """
from transformers import ContinuousBatchingConfig

prompts = [row[:count].tolist() for row, count in zip(tokens, (5, 9, 12))]
greedy = {"max_new_tokens": 6, "do_sample": False}
alone = [model.generate(torch.tensor([prompt]), **greedy)[0, len(prompt) :].tolist() for prompt in prompts]
model.set_attn_implementation("someone/flash-tilewise", allow_all_kernels=True)
results = model.generate_batch(
    inputs=prompts,
    generation_config=GenerationConfig(eos_token_id=-1, pad_token_id=0, **greedy),
    continuous_batching_config=ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=64),
)
assert [result.generated_tokens for result in results.values()] == alone
""",
    )


def run(folder: Path, program: str) -> None:
    """In a process that finds Tilewise in the tree alone, under two names of repositories."""
    package = str(Path(_binding.__file__).parents[1])
    environment = {name: value for name, value in os.environ.items() if name != "TILEWISE_TORCH_LIBRARY"}
    names = ("tilewise", "flash-tilewise")
    environment["LOCAL_KERNELS"] = ":".join(f"someone/{name}={folder}" for name in names)
    environment["HF_HUB_OFFLINE"] = "1"
    program = f"import sys\nsys.path = [path for path in sys.path if path != {package!r}]\n{program}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=300, cwd=folder, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
