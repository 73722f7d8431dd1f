"""The trained model in `examples/small-mote`: what its card and README promise."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import REMOTE, ROOT, SMALL_MOTE
from sentence_transformers import SentenceTransformer

from research.scores import FILE
from scripts import train_small_mote

QUESTION = "How do I undo my last git commit?"
ANSWER = "git reset --soft HEAD~1 moves the branch back by one and keeps the changes."
SAME_QUESTION = "What is the way to revert the latest commit in git?"
RECORD = json.loads((SMALL_MOTE / "mote.json").read_text(encoding="utf-8"))
FILES = RECORD["files"]
OTHERS = ["Why are branches in git so cheap to create?", "How do I cancel my last bank transfer?"]


@pytest.fixture(scope="module")
def small_mote() -> SentenceTransformer:
    return SentenceTransformer(str(SMALL_MOTE), trust_remote_code=True, device="cpu")


def test_it_is_small_and_complete() -> None:
    files = [SMALL_MOTE / name for name in FILES]
    assert sorted(files) == sorted(path for path in SMALL_MOTE.rglob("*") if path.is_file())
    assert sum(path.stat().st_size for path in files) <= 10_000_000
    steps = RECORD["steps"]
    assert [step["step"] for step in steps] == ["upcycle", "train", "compress"]
    assert steps[0]["sources"][0]["name"] == "small-encoder"
    texts = [path.read_text(encoding="utf-8") for path in files if path.suffix in (".json", ".md", ".yaml", ".py")]
    assert not [text for text in texts if re.search(r"/(work|home|root|tmp)/", text)]


def test_its_code_is_that_of_the_project() -> None:
    copies = [SMALL_MOTE / name for name in FILES if name.endswith(".py")]
    assert len(copies) == 7
    for file in copies:
        assert file.read_bytes() == (REMOTE / file.name).read_bytes(), f"{file}: copy {file.name} from {REMOTE}"


def test_its_card_has_the_tables_of_the_stored_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No model is trained or scored."""
    model = shutil.copytree(SMALL_MOTE, tmp_path / "small-mote")
    card = (SMALL_MOTE / "README.md").read_text(encoding="utf-8")
    (model / "README.md").write_text(re.sub(r"\n## Scores\n.*", "", card, flags=re.DOTALL), encoding="utf-8")
    monkeypatch.chdir(ROOT)
    train_small_mote.compare(Path("DATA"), model, FILE, tmp_path / "work", train_small_mote.SEEDS)
    assert (model / "README.md").read_text(encoding="utf-8") == card


def test_search_and_matching(small_mote: SentenceTransformer) -> None:
    texts = [ANSWER, SAME_QUESTION, *OTHERS]
    by_meaning = small_mote.similarity(small_mote.encode(QUESTION, task="sts"), small_mote.encode(texts, task="sts"))
    assert by_meaning.argmax() == texts.index(SAME_QUESTION)
    found = small_mote.similarity(small_mote.encode_query(QUESTION), small_mote.encode_document([ANSWER, *OTHERS]))
    assert found.argmax() == 0
    experts = ("search", "classification", "clustering")
    embedded = np.stack([small_mote.encode(QUESTION, task=task) for task in experts])
    similar = embedded @ embedded.T
    assert (similar[~np.eye(len(experts), dtype=bool)] < 0.97).all()
