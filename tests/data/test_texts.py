"""Texts and pairs from files, data folders, and the package."""

import gzip
import json
from importlib.resources import files
from pathlib import Path

import pytest
from helpers.paths import EXAMPLE_DATA

from mote.data.texts import FOLDERS, find_pairs, find_texts, read_texts


def test_texts_come_with_mote() -> None:
    texts = find_texts()
    assert len(set(texts.texts)) == 128
    assert set(texts.texts) == set(read_texts())
    rows = [json.loads(line) for line in (files("mote.data") / "texts.jsonl").read_text().splitlines()]
    assert all("(CC" in row["source"] for row in rows)
    few = find_texts(limit=10, seed=3)
    assert few == find_texts(limit=10, seed=3) != find_texts(limit=10, seed=4)
    assert set(few.texts) < set(texts.texts)


def test_texts_of_files(tmp_path: Path) -> None:
    plain, packed = tmp_path / "texts.txt", tmp_path / "texts.txt.gz"
    plain.write_text("one\n\n two \none\n\u3000\u3000\nthree\n")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for file in (plain, packed):
        assert read_texts(file) == ["one", "two", "one", "three"]
        assert find_texts(file).texts == ("one", "two", "three")


def test_pairs_of_files(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"query": "a", "positive": ["b", "c"]}\n{"query": "d", "positive": "e"}\n')
    pairs = find_pairs(file)
    assert pairs is not None
    assert (pairs.texts, pairs.source) == ((("a", "b"), ("d", "e")), "pairs.jsonl")
    assert find_pairs() is None


def test_texts_and_pairs_of_a_folder_are_of_all_its_datasets() -> None:
    texts = find_texts(folder=EXAMPLE_DATA, limit=12, seed=1)
    assert len(set(texts.texts)) == 12
    assert texts == find_texts(folder=EXAMPLE_DATA, limit=12, seed=1)
    assert f"{sum(1 for name in FOLDERS for _ in (EXAMPLE_DATA / name).iterdir())} datasets" in texts.source
    pairs = find_pairs(folder=EXAMPLE_DATA, limit=9)
    assert pairs is not None
    assert [len(pair) for pair in pairs.texts] == [2] * 9


def test_invalid_and_missing_texts_are_named(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    for find, content, message in (
        (find_texts, "", r"its columns \(none\) are not pairs"),
        (find_texts, '{"text": "one"}', "has 1 texts or pairs: a distribution needs at least two"),
        (find_texts, '{"text": "one"}\n{"text": 3}', r"1 of 2 rows are invalid(.|\n)*:2: 'text': Input should be a "),
        (find_texts, '{"text": "one"}\n{"tex', r":2: invalid JSON"),
        (find_pairs, '{"query": "a", "text": "b"}', r"'query', 'text' are not pairs \(anchor, positive\) or scored pa"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            find(file)
    with pytest.raises(FileNotFoundError, match=r"texts\.txt"):
        find_texts(tmp_path / "texts.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="0 datasets has 0 texts"):
        find_texts(folder=tmp_path / "empty")
