"""The trained model in `examples/small-mote`: what its card and README promise."""

import json
import re

import numpy as np
import pytest
from helpers.examples import example
from helpers.paths import REMOTE, ROOT, SMALL_ENCODER, SMALL_MOTE
from helpers.rows import read_rows
from sentence_transformers import SentenceTransformer

QUERY = "Cancel my dentist appointment on Friday."
RECORD = json.loads((SMALL_MOTE / "mote.json").read_text(encoding="utf-8"))
FILES = RECORD["files"]
REQUESTS = ROOT / "examples/data/requests"


@pytest.fixture(scope="module")
def small_mote() -> SentenceTransformer:
    return SentenceTransformer(str(SMALL_MOTE), trust_remote_code=True, device="cpu")


def test_it_is_small_and_complete() -> None:
    files = [SMALL_MOTE / name for name in FILES]
    assert sorted(files) == sorted(path for path in SMALL_MOTE.rglob("*") if path.is_file())
    assert sum(path.stat().st_size for path in files) <= 10_000_000
    steps = RECORD["steps"]
    assert [step["step"] for step in steps] == ["upcycle", "train", "set"]
    assert steps[0]["sources"][0]["name"] == "small-encoder"
    texts = [path.read_text(encoding="utf-8") for path in files if path.suffix in (".json", ".md", ".yaml", ".py")]
    assert not [text for text in texts if re.search(r"/(work|home|root|tmp)/", text)]


def test_its_code_is_that_of_the_project() -> None:
    copies = [SMALL_MOTE / name for name in FILES if name.endswith(".py")]
    assert len(copies) == 5
    for file in copies:
        assert file.read_bytes() == (REMOTE / file.name).read_bytes(), f"{file}: copy {file.name} from {REMOTE}"


def test_its_texts_are_apart() -> None:
    """Training and test rows share no text, and both labels are of the same texts in one order."""
    rows = {name: read_rows(REQUESTS / f"by_{name}.jsonl.gz") for name in ("topic/train", "topic/test", "intent/test")}
    texts = {name: [re.sub(r"\W+", " ", row["text"].lower()).strip() for row in of] for name, of in rows.items()}
    assert texts["topic/test"] == texts["intent/test"]
    assert not {*texts["topic/test"]} & {*texts["topic/train"]}


def test_general_is_the_source_and_the_others_disagree(small_mote: SentenceTransformer) -> None:
    dense = SentenceTransformer(str(SMALL_ENCODER), device="cpu")
    texts = [QUERY, *example("00_quickstart").TEXTS]
    assert (small_mote.encode(texts) == dense.encode(texts)).all()
    assert (small_mote.encode_query(texts) == dense.encode(texts)).all()
    nearest = {}
    for task in ("topic", "intent"):
        query, *others = small_mote.encode(texts, task=task)
        nearest[task] = texts[1 + int(np.argmax(np.stack(others) @ query))]
    assert nearest == {
        "topic": "What appointments do I have on Friday?",
        "intent": "Take milk off my shopping list.",
    }


@pytest.mark.long
def test_its_card_has_the_scores_of_its_experts(small_mote: SentenceTransformer) -> None:
    quickstart = example("00_quickstart")
    rows = quickstart.read_requests("test")
    card = (SMALL_MOTE / "README.md").read_text(encoding="utf-8")
    for task in small_mote[0].config.experts:
        embeddings = small_mote.encode([row["text"] for row in rows], task=task)
        cells = re.search(rf"\| expert `{task}` +\|(.*)\|", card)
        assert cells is not None
        topic, intent = (float(cells[1].replace("*", "").split("|")[place]) for place in (2, 5))
        expected = [quickstart.share_of_nearest(embeddings, rows, kind) for kind in ("topic", "intent")]
        assert [topic, intent] == pytest.approx(expected, abs=0.3)
