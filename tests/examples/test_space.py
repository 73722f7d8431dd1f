"""The demo: what it computes, and, slow, a visit in a real browser."""

import gzip
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers.checkpoints import trusted
from helpers.examples import example
from helpers.paths import ROOT, SMALL_ENCODER, SMALL_MOTE
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


def rows(path: str) -> list[dict[str, str]]:
    with gzip.open(ROOT / "examples" / "data" / path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


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
    assert views.way(model, **{"text": "whales", **arguments}) == expected
    assert model[0].config.default_task is None  # what a visitor chooses is not the model's


def test_errors_are_the_models_own(views: ModuleType, model: SentenceTransformer, dense: Path) -> None:
    for arguments in ({}, {"task": "clusterin"}):
        with pytest.raises(ValueError, match="clustering") as own:
            model.encode("whales", **arguments)
        with pytest.raises(ValueError, match="clustering") as shown:
            views.way(model, "whales", **arguments)
        assert str(shown.value) == str(own.value)
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
    questions, titles, commands = TEXTS.values()
    known = {(row["label"].replace("_", " "), row["text"]) for row in rows("classification/banking77/test.jsonl.gz")}
    assert {tuple(pair) for pair in questions} <= known
    known = {row["text"] for row in rows("clustering/arxiv_titles/test.jsonl.gz")}
    assert {title for _, title in titles} <= known
    known = {(row["query"], row["positive"]) for row in rows("retrieval/tldr_pages/train.jsonl.gz")}
    assert {tuple(pair) for pair in commands} <= known


@pytest.mark.slow
def test_the_small_mote_was_not_trained_on_the_texts(shared: Path, tmp_path: Path) -> None:
    """As the page says."""
    from mote.training.data import load_data
    from mote.training.recipe_files import load_recipe
    from research.data import copy_without_tests
    from scripts.train_small_mote import RECIPE, datasets_of

    data = copy_without_tests(shared / "data", datasets_of(load_recipe(RECIPE)), tmp_path / "data")
    recipe = load_recipe(RECIPE, [f"data.folder={data}"])
    sets = load_data(recipe, AutoTokenizer.from_pretrained(SMALL_ENCODER)).sets.values()
    trained_on = {text for each in sets for column in each.column_tasks for text in each.rows[column]}
    assert len(trained_on) > 100_000
    assert not trained_on & {text for pairs in TEXTS.values() for pair in pairs for text in pair}


# In a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The demo as one starts it."""
    pytest.importorskip("gradio", reason="see examples/space/requirements.txt")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, FOLDER / "app.py", "--port", str(port)],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        printed.append(line)
        if f"http://127.0.0.1:{port}" in line:
            break
    else:
        raise AssertionError(f"the demo did not start: {printed}")
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.communicate(timeout=60)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "hide-scrollbars"):
        options.add_argument(f"--{flag}")
    for flag in ("background-networking", "component-update", "sync"):
        options.add_argument(f"--disable-{flag}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(service=webdriver.ChromeService(chromedriver), options=options)
    view = {"width": 1280, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", view)
    yield driver
    driver.quit()


class Page:
    """The demo's page in a browser."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        driver.get(url)

    def wait(self, condition: Callable[[], Any]) -> Any:
        """Wait until a condition holds; an element that the page has just replaced is looked up again."""
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.ui import WebDriverWait

        waiting = WebDriverWait(self.driver, 120, ignored_exceptions=[StaleElementReferenceException])
        return waiting.until(lambda _: condition())

    def all(self, selector: str) -> list[Any]:
        return [element for element in self.driver.find_elements("css selector", selector) if element.is_displayed()]

    def text(self, selector: str) -> str:
        return "\n".join(element.text for element in self.all(selector))

    def click(self, selector: str, text: str) -> None:
        self.wait(lambda: [element for element in self.all(selector) if element.text == text])[0].click()

    def write(self, selector: str, text: str) -> None:
        from selenium.webdriver.common.keys import Keys

        self.wait(lambda: self.all(selector))[0].send_keys(Keys.CONTROL, "a")
        self.all(selector)[0].send_keys(text)

    def picture(self, selector: str) -> bytes:
        return self.all(selector)[0].screenshot_as_png

    def unnamed(self) -> list[str]:
        """Controls that a screen reader has no name for."""
        controls = self.all("input, textarea, select, button:not([tabindex='-1'])")
        return [each.get_attribute("outerHTML") for each in controls if not each.accessible_name]


@pytest.mark.slow
def test_a_visit(url: str, browser: Any) -> None:
    """Each tab does what it promises."""
    page = Page(browser, url)
    page.wait(lambda: page.text("#spread strong").startswith("classification"))
    assert re.search(r"small-encoder, upcycled to 3 experts and trained for \d+ steps", page.text("body"))
    assert page.unnamed() == []
    page.wait(lambda: page.all("#heat-map img"))
    before = page.picture("#map"), page.picture("#heat-map")
    page.click("label", "clustering")
    page.wait(lambda: page.text("#spread strong").startswith("clustering"))
    page.wait(lambda: page.picture("#map") != before[0] and page.picture("#heat-map") != before[1])

    page.click("button[role=tab]", "Search")
    assert page.unnamed() == []
    page.write("#query textarea, #query input", "Convert a graph from gv to gml format")
    page.click("button:not([role])", "Search")
    page.wait(lambda: re.search(r"\b1\n0\.\d\d\ngv2gml", page.text("#ranked")))
    counts = " ".join(page.text("#counts").split())
    assert re.search(r"first \d+ times as query → document , \d+ times as classification → clus", counts)
    page.write("#query textarea, #query input", " ")
    page.click("button:not([role])", "Search")
    page.wait(lambda: "Write a query, and at least one document." in page.text(".toast-body"))

    page.click("button[role=tab]", "Which expert?")
    page.wait(lambda: "Expert: clustering" in page.text("#answer"))
    assert page.unnamed() == []
    page.write("#text textarea, #text input", "How do whales breathe?")
    page.click("button", "Find its expert")
    page.wait(lambda: "No task for the text 'How do whales breathe?'" in page.text(".toast-body"))
    page.wait(lambda: "No expert" in page.text("#answer"))
    page.click("label", "encode_query(text)")
    page.click("button", "Find its expert")
    page.wait(lambda: "search_query: How do whales breathe?" in page.text("#answer"))

    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    assert [one for one in asked if not one.startswith((url, "data:", "blob:", "chrome:", "chrome-untrusted:"))] == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
