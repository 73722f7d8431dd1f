"""benchmarks.results: the tables of the documentation are those of the kept scores."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import ROOT
from helpers.scores import store_scores

from benchmarks import results
from benchmarks.paper import claims, figures, readme, tables
from benchmarks.paper.runs import Scores
from mote.analysis.analyze import Analysis, ModelAnalysis
from mote.analysis.similarity import welch_test
from mote.data.texts import Texts

DOCS = ROOT / "docs"


def rows_of(page: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without emphasis."""
    text = (DOCS / page).read_text(encoding="utf-8").split(heading, 1)[1]
    table = re.search(r"^\|.*?(?=\n\n)", text, re.DOTALL | re.MULTILINE)
    assert table is not None
    rows = table[0].replace("*", "").splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def kept(file: Path) -> Scores:
    of = json.loads((DOCS / "results" / file).read_text(encoding="utf-8"))
    return Scores(of["every"], of["types"])


def test_the_tables_are_those_of_the_kept_scores_and_none_is_missing() -> None:
    assert results.rewrite_pages(DOCS, check=True) == ([], [])


def test_records_and_results_are_small() -> None:
    files = [path for name in ("runs", "results") for path in (DOCS / name).rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in files) < 1_000_000


def test_three_separate_models_are_one_variant(tmp_path: Path) -> None:
    def store(name: str, **scores: dict[str, float]) -> None:
        store_scores(tmp_path / f"{name}-seed42.json", scores)

    store("mote+mined", Retrieval={"r1": 50.0}, Classification={"c1": 60.0}, Clustering={"k1": 40.0})
    store("sem-retrieval+mined", Retrieval={"r1": 51.0})
    store("sem-classification+mined", Classification={"c1": 61.0})
    assert results._models(tmp_path).keys() == {"mote+mined", "sem-retrieval+mined", "sem-classification+mined"}
    store("sem-clustering+mined", Clustering={"k1": 41.0})
    store_scores(tmp_path / "sem-retrieval+mined-seed43.json", {"Retrieval": {"r1": 52.0}})
    found = results._models(tmp_path)
    assert found.keys() == {"mote+mined", "sem+mined"}
    assert found["sem+mined"] == {
        42: {"Retrieval": {"r1": 51.0}, "Classification": {"c1": 61.0}, "Clustering": {"k1": 41.0}}
    }


def test_the_paper_s_tables_are_made_of_the_models_of_a_scale(tmp_path: Path) -> None:
    """With the columns that have scores; what cannot be compared is left out."""
    folder = tmp_path / "medium" / "runs" / "test"
    folder.mkdir(parents=True)

    def store(name: str, kind: str, *scores: float) -> None:
        for seed, score in enumerate(scores, start=42):
            scores_of_seed = {kind: {f"{kind}1": score, f"{kind}2": score + seed}}
            store_scores(folder / f"{name}-seed{seed}.json", scores_of_seed)

    store("em", "Retrieval", 50.0, 51.0)
    store("mote", "Retrieval", 52.0, 54.0)
    known = results.known_tables(tmp_path)
    assert known.keys() == {"medium/table2", "medium/table3", "medium/claims", "medium/models"}
    assert "| mote over em | Retrieval | +5.21 | +2.50 | +2.00, +3.00 |" in known["medium/table2"]
    assert "ic over em" not in known["medium/claims"]
    assert known["medium/table2"].startswith("| the paper's |")  # three columns have no scores
    store("start", "Retrieval", 30.0)
    store("ic", "Retrieval", 50.0, 52.0)
    for name, kind in (("retrieval", "Retrieval"), ("classification", "STS"), ("clustering", "Clustering")):
        store(f"sem-{name}", kind, 49.0)
    known = results.known_tables(tmp_path)
    assert known["medium/table2"].startswith("|  | start | em | sem | ic | mote |")
    assert "mote over ic" in known["medium/claims"]
    store("mote+unseen-by-mean", "Retrieval", 54.0)
    store("mote+five-tasks", "Retrieval", 55.0)
    known = results.known_tables(tmp_path)
    shown = {
        name: re.findall(r"^\| ([a-z][a-z+-]+) \|", known[f"medium/{name}"], re.MULTILINE)
        for name in ("models", "five-tasks")
    }
    assert shown == {
        "models": ["start", "em", "ic", "mote", "mote+unseen-by-mean", "sem"],
        "five-tasks": ["start", "mote"],
    }


def test_validation_scores_of_a_scale_that_repeats_are_shown(tmp_path: Path) -> None:
    folder = tmp_path / "medium-gpu" / "runs" / "validation-models"
    assert "medium-gpu/validation" not in results.known_tables(tmp_path)
    folder.mkdir(parents=True)
    for name, scores in (
        ("em", {"STS": {"s1": 50.0, "s2": 60.0}, "Retrieval": {"r": 45.0}}),
        ("sem-sts", {"STS": {"s1": 70.0, "s2": 70.0}}),
        ("mote", {"STS": {"s1": 70.0, "s2": 80.0}, "Retrieval": {"r": 45.0}}),
    ):
        store_scores(folder / f"{name}.json", scores)
    shown = results.known_tables(tmp_path)["medium-gpu/validation"]
    assert shown.splitlines()[2:] == [
        "| mote | 60.00 | 45.00 | 75.00 |",
        "| em | 50.00 | 45.00 | 55.00 |",
        "| sem-sts |  |  | 70.00 |",  # not all types
    ]


def test_figures_4_to_7_are_made_of_the_trials_at_the_best_rate(tmp_path: Path) -> None:
    """With the models that have scores, which are not taken for three separate models."""
    scale = tmp_path / "medium-bf16"

    def store(folder: str, name: str, score: float) -> None:
        path = scale / "runs" / folder / f"{name}-seed42.json"
        store_scores(path, {"Retrieval": {"r1": score}})

    store("test-trials-0.0004", "sem-retrieval-homogeneous-0.03", 52.0)
    store("test-trials-0.0004", "sem-retrieval-heterogeneous-0.03", 51.0)
    store("test-trials-0.0002", "sem-retrieval-homogeneous-0.03", 99.0)
    sweep = {name: {"0.0002": 60.0, "0.0004": 61.0} for name in ("em", "mote")}
    (scale / "sweep.json").write_text(json.dumps(sweep), encoding="utf-8")
    assert results.known_tables(tmp_path)["medium-bf16/figures4to7"].splitlines()[2:] == [
        "| retrieval | homogeneous |  | **52.00** |  |",
        "| retrieval | heterogeneous |  | 51.00 |  |",
    ]
    scale.rename(tmp_path / "smoke")  # no sweep, no trials
    (tmp_path / "smoke" / "sweep.json").unlink()
    (tmp_path / "smoke" / "runs" / "test-trials-0.0004").rename(tmp_path / "smoke" / "runs" / "test")
    assert "**52.00**" in results.known_tables(tmp_path)["smoke/figures4to7"]


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command on the documentation in a folder: exit status and output."""

    def run(docs: Path, *options: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["results", "--docs", str(docs), *options])
        with pytest.raises(SystemExit) as end:
            results.main()
        return end.value.code, capsys.readouterr().out

    return run


def test_the_command_compares_or_rewrites(tmp_path: Path, command: Command) -> None:
    run = partial(command, tmp_path)
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
    (tmp_path / "results" / "again.md").write_text(text, encoding="utf-8")  # right there, and wrong on the other page
    assert run("--check") == (1, "different from the kept scores: mining\n")


def test_readme_shows_the_result() -> None:
    """Its numbers with a sign, and its p-value, are those of the claims."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    scores = kept(results.README_TABLE)
    assert results.rewrite(page, {"readme": readme.readme_table(scores)})[1] == {"readme": False}
    assert readme.drawn_gains(DOCS / results.CHART) == readme.gains_of(scores)
    assert (DOCS / results.CHART).stat().st_size < 40_000
    first_screen = page.split("\n## ", 1)[0]
    for link in (results.CHART, "results/small.md", "results.md", "plan-of-experiments.md"):
        assert f"](docs/{link})" in first_screen
    known = results.known_tables(DOCS / "results")
    expected = {
        ("small_mote", "mote over start | all rows"): ("+1.27", "0.0038"),
        ("small_mote", "mote over em | all rows"): ("+0.53", "0.0034"),
        ("small_mote", "mote over ic | all rows"): ("+0.58", "0.0022"),
        ("medium-bf16/best", "mote over ic+to-start-0.25 | all rows"): ("+0.95", "0.0058", "1.8e-06"),
        ("medium-bf16/best", "mote over ic+rate-0.5 | all rows"): ("+1.34", "4.5e-09"),
        ("medium-bf16/best", "mean over all (60)"): ("64.50", "63.55"),
        ("medium-bf16/five-tasks", "| sem |"): ("64.98",),
        ("medium-bf16/five-tasks", "near-start+search-to-start-0.25 |"): ("64.86",),
        ("medium-bf16/unseen", "all rows"): ("0.014",),
        ("medium-bf16/goal", "the best of the others in one model"): ("+1.0",),
        ("medium-gpu/best", "mote over ic | all rows"): ("+0.92", "0.0038"),
        ("medium-gpu/best", "mote over ic+two-epochs+to-start-0.25 | all rows"): ("+0.57", "0.033"),
        ("large-gpu/best", "mote over ic+to-start-0.25 | all rows"): ("+0.50", "0.0022", "0.0075"),
        ("large-gpu/five-tasks", "| sem |"): ("66.93",),
        ("large-gpu/five-tasks", "near-start+search-to-start-0.25+to-start-0.25 |"): ("66.24",),
        ("medium-cpu/best", "mote over ic+mined+to-start-0.25 | all rows"): ("+1.05", "0.0053", "0.00037"),
        ("medium-cpu/best", "mean over all (60)"): ("64.68", "63.63"),
        ("medium-cpu/five-tasks", "| sem |"): ("64.84",),
        ("medium-cpu/five-tasks", "own-moves-and-shared+summaries-distilled |"): ("64.79",),
        ("medium-gpu/claims", "mote over em | all rows"): ("+2.60",),
        ("medium-gpu/table3", "mean over all (60)"): ("58.75", "58.95"),
        ("medium-bf16/models", "| mote |"): ("58.62",),
        ("medium-labels/table2", "mote over em | all rows"): ("+4.00", "5.1e-05"),
        ("medium-labels/table2", "mote over em | Retrieval"): ("+9.94",),
        ("medium-labels/table2", "mote over ic | all rows"): ("+0.51",),
        ("medium-bf16/models", "| mote+unseen-by-search_document |"): ("59.17",),
        ("medium-embedder/table3", "mean over all (60)"): ("60.42", "60.50"),
        ("medium-embedder/models", "| mote+unseen-by-search_document |"): ("60.62",),
    }
    for (table, row), numbers in expected.items():
        (line,) = {line for line in known[table].splitlines() if row in line and all(one in line for one in numbers)}
        assert line
    text = first_screen.split(results.END)[1]
    shown = re.findall(r"[+-]\d+\.\d+|(?<=p = )[\d.e-]*\d|\b\d\d\.\d\d\b", text)
    assert {*shown} == {number for numbers in expected.values() for number in numbers}


def test_readme_s_table_and_chart_by_hand(tmp_path: Path) -> None:
    types = {"r1": "Retrieval", "r2": "Retrieval", "c": "Classification", "k": "Clustering", "s": "STS"}
    types |= {"p": "PairClassification", "a": "Reranking", "u": "Summarization"}
    every = {"start": [10.0, 10.0], "em": [20.0, 22.0], "ic": [23.0, 21.0], "mote": [30.0, 34.0], "sem": [99.0, 99.0]}
    scores = Scores({name: dict.fromkeys(types, values) for name, values in every.items()}, types)
    scores.every["mote"] |= {"r2": [40.0, 40.0], "u": [6.0, 6.0]}
    assert readme.readme_table(scores).splitlines() == [
        "| test sets | source encoder | dense | dense, instructions | MoTE |",
        "| --- | --- | --- | --- | --- |",
        "| retrieval (2) | 10.00 | 21.00 | 22.00 | **36.00** |",
        "| classification (1) | 10.00 | 21.00 | 22.00 | **32.00** |",
        "| clustering (1) | 10.00 | 21.00 | 22.00 | **32.00** |",
        "| tasks without training data (4) | 10.00 | 21.00 | 22.00 | **25.50** |",
        "| all (8) | 10.00 | 21.00 | 22.00 | **29.75** |",
    ]
    gains = readme.gains_of(scores)
    assert list(gains) == ["source encoder", "dense, instructions", "MoTE"]
    assert list(gains["MoTE"])[:2] == ["Retrieval (2)", "Classification (1)"]
    assert gains["source encoder"]["STS (1)"] == [-10.0, -12.0]
    assert gains["dense, instructions"]["all (8)"] == [3.0, -1.0]
    assert gains["MoTE"]["Retrieval (2)"] == [15.0, 15.0]
    readme.draw_gains(gains, tmp_path / "gains.png")
    assert readme.drawn_gains(tmp_path / "gains.png") == gains


def test_the_chart_is_drawn_if_it_lacks_or_differs(tmp_path: Path, command: Command) -> None:
    run = partial(command, tmp_path / "docs")
    scores = tmp_path / "docs" / "results" / results.README_TABLE
    scores.parent.mkdir(parents=True)
    table = results.README_TABLE.stem
    scores.write_bytes((DOCS / "results" / results.README_TABLE).read_bytes())
    (tmp_path / "README.md").write_text(f"<!-- table: readme -->{results.END}")
    differing = "different from the kept scores: readme, images/gains.png"
    assert run("--check") == (1, f"{differing}\non no page: {table}\n")
    (tmp_path / "docs" / "results.md").write_text(f"<!-- table: {table} -->{results.END}")
    assert run() == (0, f"rewritten: readme, {table}, images/gains.png\n")
    assert run("--check") == (0, "")
    content = json.loads(scores.read_text())
    content["every"]["mote"] = {name: [score + 1 for score in of] for name, of in content["every"]["mote"].items()}
    scores.write_text(json.dumps(content))
    assert run("--check") == (1, f"different from the kept scores: readme, {table}, images/gains.png\n")
    assert run()[0] == 0
    assert run("--check") == (0, "")
    (tmp_path / "docs" / results.CHART).unlink()
    assert run("--check") == (1, "different from the kept scores: images/gains.png\n")


def test_tables_on_no_page_get_the_page_of_their_scale(tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "results" / "medium"
    folder.mkdir(parents=True)
    scores = kept(Path("small/scores.json"))
    every = {name: scores.every[name] for name in ("em", "ic", "mote")}
    (folder / "scores.json").write_text(json.dumps({"every": every, "types": scores.types}), encoding="utf-8")
    own = claims.Table("Own", ("em", "mote"), "em", claims=(claims.Claim("mote", "em"),))
    (folder / "beyond.json").write_text(json.dumps({"table": asdict(own)}), encoding="utf-8")
    assert command(tmp_path)[0] == 0
    page = tmp_path / "results" / "medium.md"
    text = page.read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# The paper's tables at scale medium",
        "## claims: the paper's claims in short",
        f"## table2: {claims.TABLES['table2'].title}",
        f"## table3: {claims.TABLES['table3'].title}",
        "## beyond: Own",
    ]
    assert "| mote over ic | Retrieval |" in text
    every["mote-static"] = scores.every["mote-static"]
    (folder / "scores.json").write_text(json.dumps({"every": every, "types": scores.types}), encoding="utf-8")
    page.write_text(text.replace("medium\n", "medium\n\nBy hand.\n", 1), encoding="utf-8")
    assert command(tmp_path) == (0, "rewritten: medium/claims, medium/table4\n")
    text = page.read_text(encoding="utf-8")
    assert "\n\nBy hand.\n\n## claims:" in text
    assert text.rindex("## ") == text.index("## table4: Task-aware")


def test_an_analysis_is_kept_without_its_texts(tmp_path: Path) -> None:
    values = np.random.default_rng(0).uniform(size=(2, 3))
    models = [
        ModelAnalysis(label, {"a": "a: ", "b": "b: "}, {}, {("a", "b"): values[number]}, layout=np.zeros((6, 2)))
        for number, label in enumerate(("mote", "ic"))
    ]
    test = welch_test("mote", "ic", ("a", "b"), *values)
    found = Analysis(tuple(models), (test,), Texts(("one text", "some words", "a third"), "three texts"), None, 0)
    of_file = json.dumps(figures.kept_analysis(found))
    assert "words" not in of_file
    assert len(of_file) < len(json.dumps(found.to_dict()))
    (tmp_path / "medium").mkdir()
    (tmp_path / "medium" / "figure3.json").write_text(of_file)
    shown = results.known_tables(tmp_path)["medium/figure3"]
    assert shown == found.to_markdown().split("\n\n", 1)[1].replace("## ", "### ")


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
    of_file = {"own": {"table": asdict(table)}, "scores": asdict(scores), "sweep": {"em": {1e-4: 50.0, 2e-4: 51.0}}}
    for name, content in of_file.items():
        (tmp_path / "medium" / f"{name}.json").write_text(json.dumps(content))
    known = results.known_tables(tmp_path)
    assert known["medium/own"] == tables.report(table, scores)
    assert known["medium/sweep"].splitlines()[2:] == ["| em | 50.00 | **51.00** |"]


def test_what_was_kept_of_tables_written_by_hand() -> None:
    """Table 2, of which the scores of `sem` were not kept, and the test splits of the variants beyond the paper."""
    scores = kept(Path("small/scores.json"))
    table = replace(claims.TABLES["table2"], variants=("start", "em", "ic", "mote"))
    lines = tables.table_of(table, scores).replace("*", "").splitlines()[2:]
    shown = [[row[column] for column in (0, 1, 2, 4, 5)] for row in rows_of("results/small.md", "## table2")]
    assert shown == [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

    names = ("mote", "mote-to-mean-0.5", "mote-shared", "mote-expert-rates", "mote-homogeneous")
    for name, row in zip(names, rows_of("results.md", "## Variants that may beat MoTE"), strict=True):
        groups = [tables.datasets_of(scores, types, names) for types in (claims.SEEN, claims.UNSEEN, ())]
        assert row[2:5] == [f"{tables.cell(scores, name, group).mean:.2f}" for group in groups]
        tests = tables.compared(claims.Claim(name, "mote"), claims.Table("", names, "mote"), scores).tests
        assert row[5:] == (["", ""] if name == "mote" else [f"{tests.gain:+.2f}", f"{tests.paired_t:.2f}"])
