"""benchmarks.results: the tables of the documentation are those of the kept scores."""

import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from helpers.paths import ROOT

from benchmarks import results
from benchmarks.paper import claims, tables
from benchmarks.paper.runs import Scores
from mote.evaluation.statistics import compare_scores

DOCS = ROOT / "docs"


def rows_of(page: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without emphasis."""
    text = (DOCS / page).read_text(encoding="utf-8").split(heading, 1)[1]
    table = re.search(r"^\|.*?(?=\n\n)", text, re.DOTALL | re.MULTILINE)
    assert table is not None
    rows = table[0].replace("*", "").splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def kept(name: str) -> Scores:
    of = json.loads((DOCS / "results" / "small" / f"{name}.json").read_text(encoding="utf-8"))
    return Scores(of["every"], of["types"])


def test_the_tables_are_those_of_the_kept_scores_and_none_is_missing() -> None:
    assert results.rewrite_pages(DOCS, check=True) == ([], [])


def test_records_and_results_are_small() -> None:
    files = [path for name in ("runs", "results") for path in (DOCS / name).rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in files) < 1_000_000


def test_the_command_compares_or_rewrites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*options: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["results", "--docs", str(tmp_path), *options])
        with pytest.raises(SystemExit) as end:
            results.main()
        return end.value.code, capsys.readouterr().out

    (tmp_path / "results").mkdir()
    scores = (DOCS / "results" / "mining.json").read_text(encoding="utf-8")
    (tmp_path / "results" / "mining.json").write_text(scores, encoding="utf-8")
    page = tmp_path / "results.md"
    page.write_text("# Results\n", encoding="utf-8")
    assert run() == (1, "on no page: mining\n")
    page.write_text(f"before\n\n<!-- table: mining -->\n{results.END}\n\nafter\n", encoding="utf-8")
    assert run("--check") == (1, "different from the kept scores: mining\n")
    assert run() == (0, "rewritten: mining\n")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n\n<!-- table: mining -->\n\n|  | nDCG@10 here |")
    assert text.endswith(f"\n\n{results.END}\n\nafter\n")
    assert run("--check") == (0, "")
    page.write_text(text.replace("62.81", "62.82"), encoding="utf-8")
    assert run("--check") == (1, "different from the kept scores: mining\n")


def test_an_unknown_table_and_one_without_an_end() -> None:
    with pytest.raises(ValueError, match="no kept scores for table 'minning'; known: mining, cot"):
        results.rewrite(f"<!-- table: minning -->{results.END}", {"mining": "", "cot": ""})
    with pytest.raises(ValueError, match="Table 'mining' has no <!-- end of table -->"):
        results.rewrite(f"<!-- table: mining --><!-- table: cot -->{results.END}", {"mining": "", "cot": ""})


def test_a_kept_table_is_laid_out_as_it_was_printed(tmp_path: Path) -> None:
    table = claims.Table("Own", ("a", "b"), "a", ("STS",), (claims.Claim("b", "a", "STS"),))
    scores = Scores(
        {"a": {"s1": [1.0], "s2": [2.0]}, "b": {"s1": [3.0, 3.5], "s2": [3.0, 4.0]}}, {"s1": "STS", "s2": "STS"}
    )
    (tmp_path / "medium").mkdir()
    of_file = {"own": {"table": asdict(table), **asdict(scores)}, "sweep": {"em": {1e-4: 50.0, 2e-4: 51.0}}}
    for name, content in of_file.items():
        (tmp_path / "medium" / f"{name}.json").write_text(json.dumps(content))
    known = results.known_tables(tmp_path)
    assert known["medium/own"] == tables.report(table, scores)
    assert known["medium/sweep"].splitlines()[2:] == ["| em | 50.00 | **51.00** |"]


def test_what_was_kept_of_tables_written_by_hand() -> None:
    """Table 2, of which the scores of `sem` were not kept, and the test splits of the variants beyond the paper."""
    scores = kept("table2")
    table = replace(claims.TABLES["table2"], variants=("start", "em", "ic", "mote"))
    lines = tables.table_of(table, scores).replace("*", "").splitlines()[2:]
    shown = [[row[column] for column in (0, 1, 2, 4, 5)] for row in rows_of("results/small.md", "## table2")]
    assert shown == [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

    scores = kept("beyond")
    names = ("mote", "mote-to-mean-0.5", "mote-shared", "mote-expert-rates", "mote-homogeneous")
    means = {name: {dataset: sum(of) / len(of) for dataset, of in scores.every[name].items()} for name in names}
    for name, row in zip(names, rows_of("results.md", "## Variants that may beat MoTE"), strict=True):
        groups = [tables.datasets_of(scores, types, names) for types in (claims.SEEN, claims.UNSEEN, ())]
        assert row[2:5] == [f"{tables.cell(scores, name, group).mean:.2f}" for group in groups]
        tests = compare_scores(name, "mote", [*means[name].values()], [means["mote"][key] for key in means[name]])
        assert row[5] == ("" if name == "mote" else f"{tests.paired_t:.2f}")
