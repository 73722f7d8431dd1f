"""The tables on the pages of results are those of the stored scores."""

import re

import numpy as np
import pytest

from mote.statistics import welch_test
from research import pages
from research.experiments import SCALES, recipe_of
from research.gains import gains_of, types_table
from research.scores import Scores, Store, read
from research.summary import SUMMARIES, Row, summary_table
from research.tests.test_tables import lines_without_padding

TABLES = {path.stem: path for path in (pages.ROOT / "research" / "tables").glob("*.md")}


@pytest.fixture(scope="module")
def store() -> Store:
    return read()


@pytest.fixture(scope="module")
def known(store: Store) -> dict[str, str]:
    return pages.known_tables(store)


def test_the_tables_are_those_of_the_stored_scores(store: Store) -> None:
    assert pages.rewrite_pages(pages.ROOT, store, check=True) == []


def test_every_table_is_on_a_page(known: dict[str, str]) -> None:
    texts = [path.read_text(encoding="utf-8") for pattern in pages.PAGES for path in pages.ROOT.glob(pattern)]
    shown = {name for text in texts for name in re.findall(r"<!-- table: (\S+) -->", text)}
    assert known.keys() - shown <= {"small/models"}


def test_the_short_page_is_short() -> None:
    text = (pages.ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 1500
    shown = set(re.findall(r"<!-- table: summary/(\S+) -->", text))
    assert shown == SUMMARIES.keys()


def test_links_lead_somewhere() -> None:
    for page in (pages.ROOT / "research").rglob("*.md"):
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            assert link.startswith("https://") or (page.parent / link).exists(), (page, link)


def test_a_page_is_rewritten(known: dict[str, str]) -> None:
    page = f"before\n\n<!-- table: mining -->\n{pages.END}\n\nafter\n"
    new, differing = pages.rewrite(page, known)
    assert differing == ["mining"]
    assert re.match(r"before\n\n<!-- table: mining -->\n\n\| +\| nDCG@10 here \|", new)
    assert new.endswith(f"\n\n{pages.END}\n\nafter\n")
    assert pages.rewrite(new, known) == (new, [])
    assert pages.rewrite(new.replace("62.81", "62.82"), known) == (new, ["mining"])
    with pytest.raises(ValueError, match="No scores are stored for table 'minning'; known: cot, "):
        pages.rewrite(f"<!-- table: minning -->{pages.END}", known)
    with pytest.raises(ValueError, match="Table 'mining' has no <!-- end of table -->"):
        pages.rewrite("<!-- table: mining -->", known)


@pytest.mark.parametrize("name", ["figure1", "figure3"])
def test_figures_1_and_3_are_those_of_the_stored_analysis(name: str, store: Store) -> None:
    """Their mean similarities, and Welch's test between two models; these tables are not rewritten."""
    section = TABLES["medium-bf16"].read_text(encoding="utf-8").split(f"\n## {name}:")[1].split("\n## ")[0]
    models = store.contents("analysis", "medium-bf16")[name]["content"]["models"]
    for tasks in models[0]["similarity"]:
        values = [np.array(one["similarity"][tasks]) for one in models]
        cells = [f"{one.mean():.3f} ({one.std(ddof=1):.3f})" for one in values]
        assert f"| {tasks} | {' | '.join(cells)} |" in section
        if len(values) == 2:
            test = welch_test(*values)
            assert f"| {tasks} | {test.mean_first - test.mean_second:+.3f} | {test.t:.2f} |" in section


@pytest.mark.parametrize("scale", ["medium-bf16", "medium-gpu", "medium-labels", "medium-embedder"])
def test_recipes_are_those_of_the_stored_scores(scale: str, store: Store) -> None:
    """Of the first seed of each variant: rate, batches, experts and epochs."""
    of_scale = SCALES[scale]
    rows = {one.variant: one for one in store.of_scale(scale) if one.variant in of_scale.variants}
    for name, row in rows.items():
        if name == "start":
            continue
        recipe = recipe_of(of_scale, of_scale.variants[name], "SOURCE", "DATA", row.seed).model_dump()
        for key, value in row.settings.items():
            part, _, setting = key.partition(".")
            if part in ("training", "model") and "." not in setting and setting != "seed":
                assert recipe[part][setting] == value, (name, key)


def test_a_summary_compares_by_common_seeds_and_datasets() -> None:
    types = {"r1": "Retrieval", "r2": "Retrieval", "s": "STS"}
    every = {"em": {"r1": [50.0, 51.0], "r2": [60.0, 60.0], "s": [70.0, 70.0]}, "mote": {"r1": [52.0], "r2": [63.0]}}
    scores = Scores(every, types, {"em": (42, 43), "mote": (42,)})
    rows = (Row("MoTE over dense", "small", "mote", "em", "Retrieval", paper=5.21),)
    assert lines_without_padding(summary_table(rows, {"small": scores})) == [
        "| | MoTE | other | gain | paper | p, sets | seeds |",
        "|-|-:|-:|-:|-:|-:|-:|",
        "| MoTE over dense | 57.50 | 55.00 | +2.50 | +5.21 | 0.063 | 1 |",
    ]


def test_the_small_mote_s_table_and_chart_by_hand() -> None:
    types = {"r1": "Retrieval", "r2": "Retrieval", "c": "Classification", "k": "Clustering", "s": "STS"}
    types |= {"p": "PairClassification", "a": "Reranking", "u": "Summarization"}
    every = {"start": [10.0, 10.0], "em": [20.0, 22.0], "ic": [23.0, 21.0], "mote": [30.0, 34.0]}
    seeds = dict.fromkeys(every, (42, 43))
    scores = Scores({name: dict.fromkeys(types, values) for name, values in every.items()}, types, seeds)
    scores.every["mote"] |= {"r2": [40.0, 40.0], "u": [6.0, 6.0]}
    assert lines_without_padding(types_table(scores))[2:] == [
        "| retrieval (2) | 10.00 | 21.00 | 22.00 | **36.00** |",
        "| classification (1) | 10.00 | 21.00 | 22.00 | **32.00** |",
        "| clustering (1) | 10.00 | 21.00 | 22.00 | **32.00** |",
        "| tasks without training data (4) | 10.00 | 21.00 | 22.00 | **25.50** |",
        "| all (8) | 10.00 | 21.00 | 22.00 | **29.75** |",
    ]
    gains = gains_of(scores)
    assert list(gains["MoTE"])[:2] == ["Retrieval (2)", "Classification (1)"]
    assert gains["source encoder"]["STS (1)"] == [-10.0, -12.0]
    assert gains["MoTE"]["Retrieval (2)"] == [15.0, 15.0]
