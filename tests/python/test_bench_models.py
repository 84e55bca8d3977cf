"""Tables and plots of whole models, from hand-made records."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from tilewise.bench import llama_figures, text_figures
from tilewise.bench import model_figures as figures
from tilewise.bench.charts import Chart

Line = dict[str, Any]
HEAD: Line = {"environment": {"gpu": "A GPU", "torch": "2.11", "date": "2026-01-02T03:04:05+00:00"}}


def scaling() -> list[Line]:
    """torch grows as N, naive as N²; wgmma does not take f32."""
    lines = [HEAD]
    for dtype in ("bf16", "f32"):
        for op in figures.PARTS:
            for pixels, tokens in ((224, 197), (512, 1025)):
                base = {"suite": "vit-model", "op": op, "dtype": dtype, "batch": 32, "depth": 12}
                base |= {"pixels": pixels, "tokens": tokens}
                lines += [base | {"impl": "torch", "ms": tokens / 1e3}]
                lines += [base | {"impl": "naive", "ms": (tokens / 100) ** 2}]
                own = {"skipped": "no"} if dtype == "f32" else {"ms": tokens / 2e3}
                lines += [base | {"impl": "wgmma"} | own]
    return [*lines, {"finished": "then"}]


def test_scaling_has_growth_and_ratio() -> None:
    text = figures.scaling_section(scaling())
    assert "A GPU, PyTorch 2.11, 2026-01-02; batch 32, 12 layers" in text
    assert "N² grows 27.1 times, N 5.2 times" in text
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:2] == "| "
    ]
    attention = rows[: rows.index(next(row for row in rows if row[0].startswith("whole model")))]
    assert ["torch", "0.197", "1.02", "5.2 times", "1.00"] in attention
    assert ["naive", "3.88", "105", "27.1 times", "0.01"] in attention
    assert ["wgmma", "0.0985", "0.512", "5.2 times", "2.00"] in attention
    assert ["wgmma", "-", "-", "-", "-"] in rows  # in f32
    assert "stay in the L2 (29 MB in bf16 at 224 px);\nthe suite `vit` in `README.md`" in text


def test_scaling_says_how_often_and_on_what() -> None:
    lines = scaling()
    for line in lines:
        if "ms" in line:
            line |= {"runs": 3 if line["impl"] == "naive" else 20, "sets": 5}
    text = figures.scaling_section(lines)
    assert "| attention, a call, bf16 (20 or 3 runs) |" in text
    assert "| whole model, f32 (20 or 3 runs) |" in text
    assert "inputs are rotated" in text and "README" not in text


# Milliseconds at 197 and 1025 tokens, about those of a record.
TIMES = {
    ("bf16", "vit attention"): {
        "torch": (0.027, 0.33), "naive": (5.0, 130.0), "tiled": (0.54, 9.3), "fused": (0.33, 5.9),
        "mma": (0.036, 0.41), "wgmma": (0.022, 0.23), "auto": (0.022, 0.23),
    },
    ("bf16", "vit model"): {
        "torch": (3.4, 18.5), "torch + auto": (3.3, 17.2), "naive": (63.0, 1563.0), "tiled": (9.2, 125.0),
        "fused": (6.7, 84.7), "mma": (3.2, 18.1), "wgmma": (3.0, 15.9), "auto": (3.0, 15.8),
        "layer": (2.8, 15.0),
    },
    ("f32", "vit attention"): {
        "torch": (0.2, 3.3), "naive": (5.0, 132.0), "tiled": (0.51, 8.8), "fused": (0.15, 2.7),
        "mma": (0.1, 1.2), "wgmma": (0.08, 0.8), "auto": (0.08, 0.8),
    },
    ("f32", "vit model"): {
        "torch": (30.4, 160.0), "torch + auto": (28.9, 129.0), "naive": (76.2, 1621.0),
        "tiled": (22.0, 172.0), "fused": (17.7, 98.9), "mma": (17.2, 81.9), "wgmma": (16.9, 78.2),
        "auto": (16.9, 81.0), "layer": (11.0, 52.2),
    },
}  # fmt: skip


def like_a_record() -> list[Line]:
    lines = [HEAD]
    for (dtype, op), times in TIMES.items():
        for place, (pixels, tokens) in enumerate(((224, 197), (512, 1025))):
            base = {"suite": "vit-model", "op": op, "dtype": dtype, "batch": 32, "depth": 12}
            base |= {"pixels": pixels, "tokens": tokens}
            lines += [base | {"impl": impl, "ms": ms[place]} for impl, ms in times.items()]
            lines += [base | {"impl": "wide", "skipped": "needs a head dim above 128, got 64"}]
    return lines


def charts_drawn(lines: list[Line], monkeypatch: pytest.MonkeyPatch) -> dict[str, Chart]:
    drawn: list[Chart] = []
    with monkeypatch.context() as patch:
        patch.setattr(figures.charts, "grid", lambda charts, *rest, **more: drawn.extend(charts) or "")
        figures.scaling_plot(lines)
    return {chart.title: chart for chart in drawn}


def test_scaling_plot_is_a_picture_with_every_series() -> None:
    svg = figures.scaling_plot(like_a_record())
    texts = [element.text for element in ElementTree.fromstring(svg).iter() if element.text]
    assert texts.count("N²") == 8 and {"naive", "wgmma", "torch", "layer"} <= set(texts)
    assert "whole model, bf16, without naive" in texts and "wide" not in texts


def test_scaling_plot_is_drawn_with_naive_and_without_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = charts_drawn(like_a_record(), monkeypatch)
    assert len(drawn) == 2 * len(TIMES)
    for (dtype, op), times in TIMES.items():
        title = f"{figures.PARTS[op]}, {dtype}"
        for chart, names in (
            (drawn[title], set(times)),
            (drawn[f"{title}, without naive"], set(times) - {"naive"}),
        ):
            assert {one.name for one in chart.series} == names
            assert all(len(one.points) == 2 for one in chart.series)
            for one in chart.series:
                assert all(chart.y.low <= ms <= chart.y.high for _, ms in one.points)
            ((label, rule),) = chart.rules
            (first, begin), (last, end) = rule[0], rule[-1]
            assert label == "N²" and end / begin == pytest.approx((last / first) ** 2)
            assert chart.x.log == chart.y.log and (not chart.y.log or (first, last) == (197, 1025))
    plain = [title for title, chart in drawn.items() if not chart.y.log]
    assert plain == ["whole model, f32, without naive"]  # where all are within a few times


def training(sdpas: tuple[float, ...] = (9.0, 1.9, 2.0, 2.1)) -> list[Line]:
    """Epochs of auto that take 2 s, and SDPA's; steps of two kernels that ran, and of one that did not."""
    base = {"suite": "vit-train", "dtype": "bf16", "batch": 512}
    lines = [HEAD]
    for epoch, both in enumerate(zip((9.0, 1.9, 2.0, 2.1), sdpas, strict=True), 1):
        for impl, seconds in zip(("auto", "sdpa"), both, strict=True):
            line = {"op": "epoch", "impl": impl, "epoch": epoch, "seconds": seconds}
            lines.append(base | line | {"loss": 1 / epoch, "accuracy": 0.225 * epoch})
    lines.append(base | {"op": "infer", "impl": "auto", "images_a_second": 123456})
    lines[-1]["kernels"] = {"forward": "wgmma", "backward": "mma"}
    lines.append(base | {"op": "steps", "impl": "auto", "ms": 11.1, "steps": 20, "loss": 2.0})
    lines[-1]["kernels"] = {"forward": "wgmma", "backward": "mma"}
    lines.append(base | {"op": "steps", "impl": "mma", "ms": 12.34, "steps": 20, "loss": 2.0})
    lines[-1]["kernels"] = {"forward": "mma", "backward": "mma"}
    lines.append(base | {"op": "steps", "impl": "wgmma", "skipped": "no backward"})
    return lines


def test_training_has_epochs_steps_and_reasons() -> None:
    lines = training()
    text = figures.training_section(lines)
    assert "| auto | 4 | 90.00% | 0.250 | 2.00 | 123456 | wgmma forward, mma backward |" in text
    assert "| sdpa | 4 | 90.00% | 0.250 | 2.00 | - | - |" in text
    assert "| auto | 11.1 | 2.0000 | wgmma forward, mma backward |" in text
    assert "| mma | 12.3 | 2.0000 | mma forward and backward |" in text
    assert "| wgmma | - | - | no backward |" in text
    assert "| loss after 20 |" in text and "17 steps were timed, from the 4th on" in text
    assert "2026-01-02; batches of 512, bf16." in text
    lines[1] |= {"data": "CIFAR-10", "training_images": 50000, "test_images": 10000}
    text = figures.training_section(lines)
    assert "2026-01-02; CIFAR-10, 50,000 images and 10,000 to test; batches of 512, bf16." in text
    del lines[-2]["kernels"]
    assert "| mma | 12.3 | 2.0000 |  |" in figures.training_section(lines)  # as older records are


def test_training_tells_a_difference_from_noise() -> None:
    alike = training((9.0, 1.92, 2.02, 2.12))
    text = figures.training_section(alike)
    assert "An epoch takes as long with auto as with SDPA, within noise (2.00 and 2.02 s)." in text
    text = figures.training_section(training((9.0, 1.0, 1.0, 1.0)))
    assert "An epoch with auto takes 2.00 times as long as with SDPA (2.00 and 1.00 s)." in text
    ours = next(line for line in alike if line.get("op") == "infer")
    alike.append(ours | {"impl": "sdpa", "images_a_second": 121000})
    assert "inference is" not in figures.training_section(alike)  # one turn of each
    ours |= {"spread": 0.03, "turns": 5}
    alike[-1] |= {"spread": 0.01, "turns": 5}
    said = "(medians of 5 turns, which spread by 3.00% at most)"
    assert f"; inference is as fast, within noise {said}." in figures.training_section(alike)
    alike[-1] |= {"images_a_second": 100000}
    assert f"; inference is 1.23 times as fast {said}." in figures.training_section(alike)


def test_llama_has_prefill_and_decoding() -> None:
    base = {"suite": "llama-model", "model": "llama-2-7b", "layers": 1, "dtype": "bfloat16", "batch": 1}
    cells = {"ms": 2.0, "tokens_a_second": 256000.0, "peak_mb": 33.0}
    lines = [
        HEAD,
        base | {"op": "prefill", "impl": "tilewise", "tokens": 512} | cells,
        base | {"op": "prefill", "impl": "hf sdpa", "tokens": 1024} | cells,
        base | {"op": "decode", "impl": "tilewise", "context": 64, "ms": 0.5, "tokens_a_second": 2000.0},
    ]
    text = llama_figures.section(lines)
    assert "| llama-2-7b, 1 layer, prefill | 512 tokens | 1024 tokens |" in text
    assert "| tilewise | 2.00 · 256 · 33.0 | - |" in text and "| hf sdpa | - | 2.00 · 256 · 33.0 |" in text
    assert "| tilewise | 0.500 | 2000 |" in text


def test_llama_has_logits_and_runs_and_no_memory_of_a_compiling_call() -> None:
    base = {"suite": "llama-model", "model": "llama-2-7b", "layers": 32, "dtype": "bfloat16", "batch": 1}
    cells = {"op": "prefill", "tokens": 512, "ms": 2.0, "tokens_a_second": 256000.0, "peak_mb": 33.0}
    lines = [
        HEAD,
        base | {"op": "logits", "relative_difference": 0.0812, "same_token": False},
        base | cells | {"impl": "tilewise"},
        base | cells | {"impl": "hf sdpa, compiled"},
    ]
    text = llama_figures.section(lines)
    assert "| llama-2-7b, 32 layers | 0.081 | no |" in text
    assert "| llama-2-7b, 32 layers, prefill | 512 tokens |" in text
    assert "| tilewise | 2.00 · 256 · 33.0 |" in text and "| hf sdpa, compiled | 2.00 · 256 · - |" in text
    lines = [line if line is HEAD else line | {"runs": 10} for line in lines]
    step = {"op": "decode", "context": 64, "ms": 0.5, "tokens_a_second": 2000.0, "runs": 3}
    lines.append(base | step | {"impl": "tilewise", "peak_mb": 12.3})
    lines.append(base | step | {"impl": "hf sdpa, compiled"})
    text = llama_figures.section(lines)
    assert "| hf sdpa, compiled | 2.00 · 256 · 33.0 |" in text and "32 layers, prefill (10 runs) |" in text
    assert "| llama-2-7b, 32 layers, decoding after 64 (3 runs) | ms a token | tokens/s | MB |" in text
    assert "| tilewise | 0.500 | 2000 | 12.3 |" in text and "| hf sdpa, compiled | 0.500 | 2000 | - |" in text


def test_llama_has_logits_of_eager_for_a_scale() -> None:
    base = {"suite": "llama-model", "model": "tiny", "layers": 2, "dtype": "float32", "batch": 1}
    ours = {"op": "logits", "relative_difference": 0.015, "same_token": True}
    eager = {"eager_relative_difference": 0.013, "eager_same_token": False}
    text = llama_figures.section([HEAD, base | ours | eager, base | {"layers": 3} | ours])
    told = "largest difference : largest logit | same next token |"
    assert f"| logits beside hf sdpa | tilewise: {told} hf eager: {told}\n" in text
    assert "| tiny, 2 layers | 0.015 | yes | 0.013 | no |" in text
    assert "| tiny, 3 layers | 0.015 | yes | - | - |" in text
    assert "hf eager" not in llama_figures.section([HEAD, base | ours])


def test_llama_has_what_did_not_run() -> None:
    base = {"suite": "llama-model", "model": "tiny", "layers": 2, "dtype": "float32", "batch": 1}
    cells = {"ms": 2.0, "tokens_a_second": 256000.0, "peak_mb": 33.0, "runs": 2}
    skipped = {"impl": "hf sdpa, compiled", "skipped": "no working compiler"}
    routes: list[Line] = [{"impl": "tilewise"} | cells, {"impl": "hf sdpa"} | cells | {"ms": 3.0}, skipped]
    prefills = [base | {"op": "prefill", "tokens": 512} | x for x in routes]
    text = llama_figures.section(
        [HEAD, *prefills, *(base | {"op": "decode", "context": 64} | x for x in routes)]
    )
    assert "| hf sdpa, compiled | - |\n| hf sdpa : tilewise | 1.50 |\n| best hf : tilewise | 1.50 |" in text
    assert "| hf sdpa, compiled | - | - | - |" in text and "`generate`" not in text
    assert "\n\nDid not run: hf sdpa, compiled at 512 (no working compiler).\n" in text
    assert text.endswith("\n\nDid not run: hf sdpa, compiled (no working compiler).")


def test_llama_has_ratios_within_a_race_and_wide_spreads() -> None:
    base = {"suite": "llama-model", "model": "llama-2-7b", "layers": 1, "dtype": "bfloat16", "batch": 1}
    base |= {"weights_mb": 929.0, "layers_mb": 405.0, "runs": 5, "tokens_a_second": 1.0, "peak_mb": 1.0}
    prefill = {"tilewise": 1.0, "hf sdpa": 2.0, "hf eager": 3.0, "hf tilewise": 0.5}
    prefill |= {"hf sdpa, compiled": 2.4, "tilewise, beside it": 1.5}
    decode = {"tilewise": 1.0, "tilewise, graph": 0.5, "hf sdpa": 3.0, "hf sdpa, compiled": 0.6}
    lines = [HEAD]
    for n, (impl, ms) in enumerate(prefill.items()):
        lines.append(base | {"op": "prefill", "tokens": 512, "impl": impl, "ms": ms, "spread": 0.02 * n})
    for impl, ms in decode.items():
        lines.append(base | {"op": "decode", "context": 64, "impl": impl, "ms": ms, "spread": 0.05})
    text = llama_figures.section(lines)
    assert 'A model of "1 layer" has the embedding and the head, too: 524 of 929 MB (llama-2-7b).' in text
    assert "| hf sdpa : tilewise | 2.00 |\n| best hf : tilewise | 1.60 |\n" in text  # compiled, beside it
    assert "| hf sdpa : tilewise | 3.00 |  |  |\n| best hf : tilewise, graph | 1.20 |  |  |" in text
    wide = "hf tilewise at 512 (6%); hf sdpa, compiled at 512 (8%); tilewise, beside it at 512 (10%)."
    assert f"\n\nBetween the quartiles lie more than 5% of the median in: {wide}\n\n" in text
    assert text.count("Between the quartiles") == 1 and "`generate`" not in text
    del lines[-1]["peak_mb"], lines[1]["layers_mb"]
    assert '"hf sdpa, compiled" decodes by `generate` in this record' in llama_figures.section(lines)
    alone = [HEAD, *figures.of(lines, impl="tilewise")]
    assert " : tilewise" not in llama_figures.section(alone)


def test_an_interrupted_record_is_drawn() -> None:
    lines = scaling()
    for count in range(2, len(lines)):
        ElementTree.fromstring(figures.scaling_plot(lines[:count]))
        assert "A GPU" in figures.scaling_section(lines[:count])
    sections = (figures.scaling_section, figures.training_section, llama_figures.section)
    assert all(section([HEAD]) == figures.NOTHING for section in sections)


def test_without_records_it_says_so(tmp_path: Path) -> None:
    found = figures.read(tmp_path)
    sections = (figures.scaling_section, figures.training_section, llama_figures.section)
    for section, name in zip(sections, figures.RECORDS, strict=True):
        assert section(found[name]) == figures.NOTHING
    (tmp_path / "vit-model.jsonl").write_text("".join(json.dumps(line) + "\n" for line in scaling()))
    assert figures.read(tmp_path)["vit-model"] == scaling()


def test_text_models_have_their_tables(tmp_path: Path) -> None:
    assert text_figures.section(tmp_path) == figures.NOTHING
    head: Line = {"environment": HEAD["environment"] | {"transformers": "5.17.0", "seed": 0}}
    embed = {"model": "minilm", "dtype": "float32", "sentences": 32, "ms": 1.5}
    kernels = {"gemm": "split", "forward": "mma"}
    lines = [
        head,
        embed | {"impl": "eager", "from_eager": 0.0},
        embed | {"impl": "tilewise", "from_eager": 6.7e-8},
        embed | {"impl": "c++", "device": "cuda", "from_python": 1.2e-7, "kernels": kernels},
        {"model": "smollm2", "impl": "sdpa", "dtype": "bfloat16", "prompt": 512, "tokens": 32, "as_eager": 5}
        | {"prompt_ms": 20.0, "tokens_a_second": 50.0},
    ]
    record = tmp_path / "text-models.jsonl"
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = text_figures.section(tmp_path)
    assert text.startswith("A GPU, PyTorch 2.11, 2026-01-02, transformers 5.17.0; random weights of seed 0.")
    assert "| MiniLM's shape, float32, 32 sentences | ms | largest difference from eager |" in text
    assert "| eager | 1.50 | 0 |" in text and "| tilewise | 1.50 | 6.7e-08 |" in text
    assert "| cuda | 1.50 | 1.2e-07 | gemm: split, forward: mma |" in text
    assert "| sdpa, bfloat16 | 20.0 | 50.0 | 5 of 32 |" in text
    record.write_text(json.dumps(head) + "\n")
    assert text_figures.section(tmp_path) == figures.NOTHING
