"""Texts of a corpus: columns, ids, ranges of rows."""

from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from helpers.rows import write_rows
from pyarrow import parquet

from mote.corpora.source import Corpus, Reader, find_corpus


def corpus_of(tmp_path: Path, rows: list[Any], **columns: Any) -> Corpus:
    return find_corpus([str(write_rows(tmp_path / "corpus.jsonl", rows))], **columns).counted()


@pytest.mark.parametrize(
    ("row", "columns", "text", "name"),
    [
        ({"text": "whales"}, {}, "whales", "0"),
        ({"_id": "d1", "title": "Sea", "text": "whales"}, {}, "Sea whales", "d1"),
        ({"_id": "d1", "title": None, "text": "whales"}, {}, "whales", "d1"),
        ({"_id": "d1", "title": "Sea", "text": ""}, {}, "Sea", "d1"),
        ({"id": 7, "text": ""}, {}, "", "7"),
        ({"id": 7, "passage": "whales"}, {}, "whales", "7"),
        ({"id": 7, "key": "k", "text": "a", "body": " b "}, {"text_columns": ["body"], "id_column": "key"}, " b ", "k"),
        ({"text": "a", "body": "b"}, {"text_columns": ["body", "text"]}, "b a", "0"),
    ],
)
def test_the_text_and_the_id_of_a_row(row: Any, columns: Any, text: str, name: str, tmp_path: Path) -> None:
    (document,) = corpus_of(tmp_path, [row], **columns).read()
    assert (document.text, document.id) == (text, name)


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"text": None}, {}, "'text' is null"),
        ({"text": 3}, {}, "'text' must be a string, got int"),
        ({"text": "\ud800"}, {}, "'text' is invalid Unicode"),
        ({"text": "a", "title": ["b"]}, {}, "'title' must be a string, got list"),
        ({"text": "a", "_id": None}, {}, "'_id' is null"),
        ({"text": "a", "id": 0.5}, {}, "'id' must be a string, got float"),
        ({"text": "a"}, {"id_column": "key"}, "there is no column 'key'. Available: 'text'."),
        ({"text": "a"}, {"text_columns": ["txt"]}, "there is no column 'txt'. Did you mean 'text'?"),
        ({"text": "a"}, {"task_column": "task"}, "there is no column 'task'"),
        ({"words": "a"}, {}, "which column holds the texts? Name it with --text-column; there are 'words'"),
        ({"query": "a", "passage": "b"}, {}, "which column holds the texts?"),
        (["a"], {}, "expected a JSON object, got list"),
    ],
)
def test_an_invalid_row_is_named(row: Any, columns: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"corpus.jsonl:1: ") as error:
        corpus_of(tmp_path, [row], **columns)
    assert message in str(error.value)


def test_a_later_invalid_row_is_named(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [{"text": "a"}, {"txt": "b"}])
    with pytest.raises(ValueError, match=r"corpus.jsonl:2: there is no column 'text'"):
        list(corpus.read())


def test_what_the_first_row_lacks(tmp_path: Path) -> None:
    """Exporters leave out empty fields: a later title counts, and a later id is not lost."""
    _, second = corpus_of(tmp_path, [{"text": "a"}, {"title": "Sea", "text": "whales"}]).read()
    assert second.text == "Sea whales"
    corpus = corpus_of(tmp_path, [{"text": "a"}, {"_id": "d1", "text": "whales"}])
    with pytest.raises(ValueError, match=r"corpus.jsonl:2: there is a column '_id', which the first row .* lacks"):
        list(corpus.read())


def test_no_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the corpus has no rows"):
        corpus_of(tmp_path, [])


def several_files(tmp_path: Path) -> Corpus:
    """Blank lines, an empty file, several row groups."""
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "0"}\n\n{"text": "1"}\n\n')
    write_rows(tmp_path / "b.jsonl.gz", [])
    rows = pyarrow.table({"text": [str(number) for number in range(2, 12)]})
    parquet.write_table(rows, tmp_path / "c.parquet", row_group_size=3)
    write_rows(tmp_path / "d.jsonl.gz", [{"text": str(number)} for number in range(12, 15)])
    return find_corpus([str(tmp_path / "*")]).counted()


def test_reading_from_any_row_on(tmp_path: Path) -> None:
    corpus = several_files(tmp_path)
    assert [part.rows for part in corpus.parts] == [2, 0, 10, 3]
    everything = list(corpus.read())
    assert [document.text for document in everything] == [str(number) for number in range(15)]
    for start in range(16):
        assert list(corpus.read(start)) == everything[start:]


def test_ranges_in_any_order(tmp_path: Path) -> None:
    corpus = several_files(tmp_path)
    reader = Reader(corpus)
    everything = list(corpus.read())
    for start, stop in [(0, 4), (4, 5), (9, 12), (2, 3), (14, 15)]:
        assert reader.read(start, stop) == everything[start:stop]
    with pytest.raises(ValueError, match="changed while they were being read"):
        reader.read(14, 16)


def test_a_file_that_grows(tmp_path: Path) -> None:
    corpus = several_files(tmp_path)
    everything = list(corpus.read())
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"text": "new"}\n')
    assert list(corpus.read()) == everything
    assert Reader(corpus).read(1, 15) == everything[1:]


def test_a_dataset_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = datasets.Dataset.from_dict({"text": ["a", "b", "c"]})
    asked = {}
    monkeypatch.setattr(datasets, "load_dataset", lambda _, **settings: asked.update(settings) or dataset)
    corpus = find_corpus(["hub:user/texts"], split="corpus", subset="en").counted()
    assert (asked["split"], asked["name"]) == ("corpus", "en")
    assert (len(corpus), corpus.parts[0].sha256) == (3, dataset._fingerprint)
    assert [(document.where, document.text) for document in corpus.read(1)] == [
        ("user/texts/en: row 2", "b"),
        ("user/texts/en: row 3", "c"),
    ]
