"""Two runs beside each other: what became faster or slower, in words, in a table and on the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_rows import row, rows, write
from tilewise import cli
from tilewise.bench import compare, records, report, summary
from tilewise.bench.problem import BadInput


def machine(lines: list[records.Line], gpu: str = "Example GPU") -> records.Record:
    environment = {"device": "cuda", "gpu": gpu, "date": "2020-01-02T03:04:05", "commit": "abc1234"}
    (merged,) = summary.by_machine([records.Record(environment=environment, rows=lines)])
    return merged


def run(**factors: float) -> records.Record:
    """The hand-made rows with some implementations that take so many times as long."""
    lines = rows()
    for line in lines:
        if line["ms"]:
            line["ms"] *= factors.get(line["impl"].replace(" ", "_"), 1.0)
    return machine(lines)


def test_changes_are_counted_where_they_are_more_than_noise() -> None:
    comparison = compare.compare(run(fused=0.5, naive=1.02, torch_math=1.1), run())
    assert len(comparison.of_ours) == 16 and len(comparison.of_peers) == 16
    assert comparison.of_ours[0].now["impl"] == "naive" and not comparison.of_ours[0].clear
    forward, backward = comparison.groups
    assert forward.name == ("ladder", "forward", "f32") and backward.name == ("ladder", "backward", "f32")
    assert (forward.faster, forward.slower) == (4, 0) and forward.of_peers == pytest.approx((1 / 1.1 + 1) / 2)
    fastest = comparison.most(faster=True)
    assert [x.now["impl"] for x in fastest] == ["fused"] * 8 and comparison.most(faster=False) == []


def test_a_rows_own_spread_is_noise() -> None:
    now, before = row("fused", 1.0, spread=0.3), row("fused", 1.2)
    assert not compare.Change(now, before).clear and compare.Change(now, before | {"ms": 1.4}).clear
    assert compare.Change(before | {"ms": 1.4}, now).times == pytest.approx(1 / 1.4)


def test_the_comparison_is_told_in_sentences() -> None:
    first, second, third = compare.sentences(compare.compare(run(fused=2.0, torch_math=1.1), run()))
    assert first == (
        "Compared with the run of 2020-01-02, commit abc1234: of 16 rows of our kernels in both, 0 are "
        "clearly faster and 8 clearly slower; the median is 0.750 times as fast."
    )
    assert second.startswith("The peers' 16 rows are 0.955 times as fast in the median")
    assert third.startswith("Most slowed down: fused at batch 1, 8 heads, ") and "ms before" in third
    alone = compare.compare(machine([row("torch math", 1.0)]), machine([row("torch math", 1.0)]))
    assert compare.sentences(alone) == ["The run of 2020-01-02, commit abc1234 has no rows of our kernels."]


def test_runs_without_a_row_in_common_are_refused() -> None:
    for other in (machine([row("fused", 1.0, suite="other")]), machine(rows(), "Another GPU")):
        with pytest.raises(BadInput, match="--against: expected rows that both runs have, got none"):
            compare.against([run()], [other])
    assert compare.against([run(), machine(rows(), "Another GPU")], [run()])[1] is None


def test_suites_that_were_renamed_are_compared(tmp_path: Path) -> None:
    now, before = (
        records.read(write(tmp_path / f"{name}.jsonl", [row("mma", ms, suite=name)]))
        for name, ms in (("sparse", 1.0), ("window", 2.0))
    )
    (change,) = compare.compare(now, before).changes
    assert change.times == 2.0


def test_the_report_has_both_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = write(tmp_path / "now.jsonl", run(fused=0.5).rows)
    before = write(tmp_path / "before.jsonl", run().rows)
    out = tmp_path / "page.html"
    assert cli.main(["report", str(now), "--against", str(before), "--out", str(out)]) == 0
    assert "8 are clearly faster and 0 clearly slower" in capsys.readouterr().out
    page = out.read_text()
    assert (
        "Compared with the earlier run" in page and "Sped up most" in page and "Slowed down most" not in page
    )
    assert "× before" in page and '<td data-v="2">2.00</td></tr>' in page
    assert f"<code>tilewise report {now} --against {before} --out {out}</code>" in page
    assert cli.main(["report", str(now), "--against", str(tmp_path / "none"), "--out", str(out)]) == 2
    assert "which is not there" in capsys.readouterr().err


def test_a_page_without_an_earlier_run_has_no_column_for_it() -> None:
    page = report.page([run()])
    assert "Compared with the earlier run" not in page and "× before</button>" not in page
