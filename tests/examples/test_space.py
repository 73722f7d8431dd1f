"""The demo: what it computes and shows."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers.checkpoints import trusted
from helpers.examples import example
from helpers.paths import EXAMPLE_DATA, ROOT, SMALL_ENCODER, SMALL_MOTE
from helpers.processes import run_python
from helpers.rows import read_rows
from sentence_transformers import SentenceTransformer
from transformers import AutoTokenizer

FOLDER = ROOT / "examples" / "space"
TEXTS = json.loads((FOLDER / "texts.json").read_text(encoding="utf-8"))
QUESTIONS = TEXTS["Banking questions, by intent"]
INSTRUCTED = "clustering: whales"


@pytest.fixture(scope="module")
def views() -> ModuleType:
    pytest.importorskip("sklearn")
    return example("space/views")


def test_an_expert_sees_texts_as_the_model_embeds_them(views: ModuleType, model: SentenceTransformer) -> None:
    groups, texts = zip(*QUESTIONS[:15], strict=True)
    seen = views.views(model, texts, groups)
    assert list(seen) == ["classification", "clustering", "search_query", "search_document"]
    embeddings = model.encode(list(texts), prompt_name="clustering", normalize_embeddings=True)
    cosines = embeddings @ embeddings.T
    np.testing.assert_allclose(seen["clustering"].similarity, cosines, atol=1e-5)
    pairs = [(i, j) for i in range(15) for j in range(15) if i != j]
    within = np.mean([cosines[i, j] for i, j in pairs if groups[i] == groups[j]])
    between = np.mean([cosines[i, j] for i, j in pairs if groups[i] != groups[j]])
    nearest = [max((j for j in range(15) if j != i), key=lambda j, i=i: cosines[i, j]) for i in range(15)]
    expected = [np.mean([groups[i] == groups[j] for i, j in enumerate(nearest)]), within, between]
    view = seen["clustering"]
    np.testing.assert_allclose([view.nearest, view.within, view.between], expected, atol=1e-5)
    assert abs(seen["classification"].similarity - cosines).max() > 0.01


def test_maps_differ_by_the_model_alone(views: ModuleType, trained_folder: Path) -> None:
    """Experts that are copies and have one instruction give one map, whatever PCA does with its signs."""
    model = trusted(trained_folder)
    config = model[0].config
    config.tasks = dict.fromkeys(config.tasks, "classification")
    config.instructions = {}
    model.prompts = {}
    groups, texts = zip(*QUESTIONS, strict=True)
    first, *others = views.views(model, texts, groups).values()
    for other in others:
        np.testing.assert_allclose(other.points, first.points, atol=1e-4)


def test_search(views: ModuleType, model: SentenceTransformer) -> None:
    pairs = TEXTS["Commands, and what they do"][:8]
    queries, commands = (list(column) for column in zip(*pairs, strict=True))
    scores = model.similarity(model.encode_query(queries[5]), model.encode_document(commands))[0]
    ranked = views.search(model, queries[5], commands, "query", "document")
    assert [rank for rank, _, _ in ranked] == list(range(1, len(commands) + 1))
    assert [text for _, _, text in ranked] == [commands[i] for i in scores.argsort(descending=True)]
    assert ranked[0][1] == pytest.approx(scores.max().item(), abs=1e-5)
    first = [views.search(model, query, commands, "query", "document")[0][2] for query in queries]
    right = sum(found == command for found, command in zip(first, commands, strict=True))
    assert views.found_first(model, pairs, "query", "document") == right


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"task": "sts"}, ("sts", "classification", "whales", 1)),
        ({"prompt_name": "clustering"}, ("clustering", "clustering", "clustering: whales", 2)),
        ({"task": "query", "prompt_name": "query"}, ("query", "search_query", "search_query: whales", 3)),
        ({"default_task": "clustering"}, ("clustering", "clustering", "whales", 5)),
        ({"text": INSTRUCTED, "default_task": "sts"}, ("clustering", "clustering", INSTRUCTED, 4)),
        (
            {"text": INSTRUCTED, "default_task": "sts", "route_by_text": False},
            ("sts", "classification", INSTRUCTED, 5),
        ),
    ],
)
def test_a_text_finds_its_expert(
    views: ModuleType, model: SentenceTransformer, arguments: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    before = model[0].config.default_task
    assert views.way(model, **{"text": "whales", **arguments}) == expected
    assert model[0].config.default_task == before  # what a visitor chooses is not the model's


def test_errors(views: ModuleType, model: SentenceTransformer) -> None:
    with pytest.raises(ValueError, match="Unknown task 'clusterin'"):
        views.way(model, "whales", task="clusterin")
    with pytest.raises(ValueError, match="three texts"):
        views.views(model, ["one"], ["group"])
    with pytest.raises(ValueError, match="not a MoTE"):
        views.config_of(SentenceTransformer(str(SMALL_ENCODER)))


def test_the_page_says_which_model_it_shows(
    views: ModuleType, model: SentenceTransformer, trained_folder: Path, fresh_folder: Path
) -> None:
    fresh = trusted(fresh_folder)
    assert "**small-mote** is **not trained**" in views.about(fresh, str(fresh_folder))
    assert "Its card says" in views.about(model, str(trained_folder))
    said = views.about(trusted(SMALL_MOTE), str(SMALL_MOTE))
    assert "**small-encoder**, upcycled to 3 experts and trained for 558 steps on 69,468 rows" in said
    assert said.endswith("by the recipe `small-mote`. It was not trained on the texts here.")


def test_texts_are_real() -> None:
    """As the page and its README say."""
    questions, titles, pairs = TEXTS.values()
    banking = read_rows(EXAMPLE_DATA / "classification/banking77/test.jsonl.gz")
    assert {tuple(pair) for pair in questions} <= {(row["label"].replace("_", " "), row["text"]) for row in banking}
    arxiv = read_rows(EXAMPLE_DATA / "clustering/arxiv_titles/test.jsonl.gz")
    assert {title for _, title in titles} <= {row["text"] for row in arxiv}
    commands = read_rows(EXAMPLE_DATA / "retrieval/tldr_pages/train.jsonl.gz")
    assert {tuple(pair) for pair in pairs} <= {(row["query"], row["positive"]) for row in commands}


@pytest.mark.slow
def test_the_small_mote_was_not_trained_on_the_texts(shared: Path, tmp_path: Path) -> None:
    from mote.training.data import load_data
    from mote.training.recipe import load_recipe
    from research.data import copy_without_tests
    from scripts.train_small_mote import RECIPE, datasets_of

    data = copy_without_tests(shared / "data", datasets_of(load_recipe(RECIPE)), tmp_path / "data")
    recipe = load_recipe(RECIPE, [f"data.folder={data}"])
    sets = load_data(recipe, AutoTokenizer.from_pretrained(SMALL_ENCODER)).sets.values()
    trained_on = {text for each in sets for column in each.column_tasks for text in each.rows[column]}
    assert len(trained_on) > 100_000
    assert not trained_on & {text for pairs in TEXTS.values() for pair in pairs for text in pair}


PAGE = r"""
import io
import app, gradio
from sentence_transformers import SentenceTransformer

demo = app.Demo(SentenceTransformer(str(app.SMALL_MOTE), trust_remote_code=True), "small-mote")
assert isinstance(app.page(demo), gradio.Blocks)
demo.model[0].config.default_task, demo.model[0].config.route_by_text = None, False
for opened, call in ((demo, app.CALLS[0]), (app.Demo(demo.model, "small-mote"), app.CALLS[1])):
    rest = opened.tasks[0], opened.prompts[0], opened.default_task, opened.route_by_text
    assert "## Expert: " in opened.route(opened.example, call, *rest)  # no error
    assert opened.call == call
assert "## Expert: clustering" in demo.route("a", "encode(text, prompt_name=…)", "", "Clustering", app.NONE, True)
demo.show("$\\frac{ | a whale\n$\\frac{ | a seal\nnot TeX | bread", "clustering")[1].savefig(io.BytesIO())
assert "| **clustering** | **" in demo.show(app.write_lines(app.MAPS[0]), "clustering")[2]
table, counts = demo.search(*app.PAIRS[16], "classification", "clustering")
assert table["document"].tolist() == [app.PAIRS[16][1]]
assert "times as `query` → `document`" in counts
assert "## Expert: search" in demo.route("whales", "encode_query(text)", "", "", app.NONE, True)
for call in (lambda: demo.search(" ", "one", "query", "query"), lambda: demo.show("a text\n" * 501, "clustering")):
    try:
        app.says_errors(call)()
    except gradio.Error as error:
        print(error)
"""


def test_the_page(tmp_path: Path) -> None:
    """It is built, and what its buttons call answers; no browser is started."""
    pytest.importorskip("gradio", reason="see examples/space/requirements.txt")
    done = run_python(f"import sys; sys.path.insert(0, sys.argv[1])\n{PAGE}", FOLDER, cwd=tmp_path)
    assert "Write a query, and at least one document" in done.stdout
    assert "501 lines: write 500 at most" in done.stdout
