"""Texts of a corpus: columns and ids."""

import re
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from helpers.rows import write_rows
from pyarrow import parquet

from mote.corpora.embed import CorpusText, read_texts, write_texts
from mote.corpora.options import EmbedOptions


def texts_of(tmp_path: Path, rows: list[Any], **options: Any) -> list[CorpusText]:
    return list(read_texts([write_rows(tmp_path / "corpus.jsonl", rows)], EmbedOptions(**options)))


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
    assert texts_of(tmp_path, [row], **columns) == [CorpusText(name, text)]


def test_an_invalid_row_is_named(tmp_path: Path) -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ({"text": 3}, {}, "'text': Input should be a valid string, got 3"),
        ({"text": "\ud800"}, {}, "'text': Input should be a valid string, unable to parse"),
        ({"text": "a", "title": ["b"]}, {}, "'title': Input should be a valid string, got ['b']"),
        ({"text": "a", "id": 0.5}, {}, "'id': Input should be a valid string, got 0.5"),
        ({"text": "a"}, {"id_column": "key"}, "'key': Input should be a valid string, got None (there is no such col"),
        ({"text": "a"}, {"task_column": "task"}, "'task': Input should be a valid string, got None"),
        ({"words": "a"}, {}, "which column holds the texts? Name it in text_columns; there are 'words'"),
        (["a"], {}, "expected a JSON object, got list"),
    ]
    for row, columns, message in cases:
        with pytest.raises(ValueError, match=rf"corpus.jsonl:1: {re.escape(message)}"):
            texts_of(tmp_path, [row], **columns)


def test_what_the_first_row_lacks(tmp_path: Path) -> None:
    """Exporters leave out empty fields: a later title counts, and a later id is an error."""
    assert texts_of(tmp_path, [{"text": "a"}, {"title": "Sea", "text": "whales"}])[1].text == "Sea whales"
    with pytest.raises(ValueError, match=r"corpus.jsonl:2: 'text': Input should be"):
        texts_of(tmp_path, [{"text": "a"}, {"txt": "b"}])
    with pytest.raises(ValueError, match=r"corpus.jsonl:2: there is an id, but the first row .* has none"):
        texts_of(tmp_path, [{"text": "a"}, {"_id": "d1", "text": "whales"}])
    with pytest.raises(ValueError, match="the corpus has no rows"):
        texts_of(tmp_path, [])


def test_several_files_are_read_in_order_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "0"}\n\n{"text": "1"}\n\n')
    write_rows(tmp_path / "b.jsonl.gz", [])
    rows = pyarrow.table({"text": [str(number) for number in range(2, 12)]})
    parquet.write_table(rows, tmp_path / "c.parquet", row_group_size=3)
    write_rows(tmp_path / "d.jsonl.gz", [{"text": str(number)} for number in range(12, 15)])
    monkeypatch.setattr("mote.corpora.embed._BATCH", 4)
    texts, digest = write_texts(tmp_path / "texts.arrow", read_texts([tmp_path / "*"], EmbedOptions()))
    for part in (slice(0, 15), slice(4, 5), slice(9, 15)):
        assert texts[part]["text"] == texts[part]["id"] == [str(number) for number in range(part.start, part.stop)]
    again = write_texts(tmp_path / "again.arrow", (CorpusText(str(number), str(number)) for number in range(15)))[1]
    other = write_texts(tmp_path / "other.arrow", (CorpusText(str(number), "") for number in range(15)))[1]
    assert digest == again != other
