"""The demo: what it computes and shows."""

import json
import shutil
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

FOLDER = ROOT / "examples" / "space"
TEXTS = json.loads((FOLDER / "texts.json").read_text(encoding="utf-8"))
QUESTIONS = TEXTS["Requests, by topic"]
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
    texts = [text for _, text in QUESTIONS[:8]]
    query = "wake me up at six"
    scores = model.similarity(model.encode_query(query), model.encode_document(texts))[0]
    ranked = views.search(model, query, texts, "query", "document")
    assert [rank for rank, _, _ in ranked] == list(range(1, len(texts) + 1))
    assert [text for _, _, text in ranked] == [texts[i] for i in scores.argsort(descending=True)]
    assert ranked[0][1] == pytest.approx(scores.max().item(), abs=1e-5)


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
    assert "**small-mote**, made of small-encoder: 3 experts, trained for 150 steps on 9,5" in said
    assert said.endswith("None of the texts here were trained on.")


def test_texts_are_real() -> None:
    """As the page and its README say; and no training row has them."""
    for (_, pairs), kind in zip(TEXTS.items(), ("topic", "intent"), strict=True):
        rows = read_rows(EXAMPLE_DATA / f"requests/by_{kind}/test.jsonl.gz")
        assert {tuple(pair) for pair in pairs} <= {(row["label"], row["text"]) for row in rows}


PAGE = r"""
import io
import app, gradio
from sentence_transformers import SentenceTransformer

demo = app.Demo(SentenceTransformer(str(app.SMALL_MOTE), trust_remote_code=True), "small-mote")
assert isinstance(app.page(demo), gradio.Blocks)
assert list(demo.ways) == ["general", "topic", "intent"]
shares = {}
for name in app.MAPS:  # each expert is the best at its own groups
    shares[name] = {expert: view.nearest for expert, view in demo.seen(app.write_lines(name))[2].items()}
topics, intents = shares.values()
assert topics["topic"] > topics["intent"] and intents["intent"] > max(intents["topic"], intents["general"]), shares
topic, intent = demo.search(app.QUERIES[0], "\n".join(("my plans on Friday", "take milk off my list")))[1:]
assert topic.startswith("### topic\n1. my plans") and intent.startswith("### intent\n1. take milk"), (topic, intent)
assert "## Expert: intent" in demo.route("a", "encode(text, prompt_name=…)", "", "intent", app.NONE, True)
assert "## Expert: general" in demo.route("whales", "encode_query(text)", "", "", app.NONE, True)
demo.show("$\\frac{ | a whale\n$\\frac{ | a seal\nnot TeX | bread", "topic")[2].savefig(io.BytesIO())
assert "| **topic** | **" in demo.show(app.write_lines(app.MAPS[0]), "topic")[3]
demo.model[0].config.default_task, demo.model[0].config.route_by_text = None, False
for opened, call in ((demo, app.CALLS[0]), (app.Demo(demo.model, "small-mote"), app.CALLS[1])):
    rest = opened.tasks[0], opened.prompts[0], opened.default_task, opened.route_by_text
    assert "## Expert: " in opened.route(opened.example, call, *rest)  # no error
    assert opened.call == call
for call in (lambda: demo.search(" ", "one"), lambda: demo.check("a text\n" * 501)):
    try:
        app.says_errors(call)()
    except gradio.Error as error:
        print(error)
"""


def test_the_page(tmp_path: Path) -> None:
    """It is built, and what its buttons call answers; no browser is started."""
    pytest.importorskip("gradio", reason="see examples/space/requirements.txt")
    done = run_python(f"import sys; sys.path.insert(0, sys.argv[1])\n{PAGE}", FOLDER, cwd=tmp_path)
    assert "Write a query, and at least one text" in done.stdout
    assert "501 lines: write 500 at most" in done.stdout


@pytest.mark.processes
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    for library in ("gradio", "playwright"):
        pytest.importorskip(library, reason="see examples/space/look.py")
    if shutil.which("chromium") is None:
        pytest.skip("no Chromium")
    look = "import sys; sys.path.insert(0, sys.argv.pop(1)); import look; look.main()"
    assert "as it should be" in run_python(look, FOLDER, cwd=tmp_path).stdout
