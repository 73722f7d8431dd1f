"""Datasets are found by path, and their rows are read with file and line."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.datasets import write
from helpers.processes import run_python
from hub.hub_server import HubServer

from mote.data.rows import find_datasets, read_files, read_rows
from mote.data.settings import DatasetSource

ROWS = [{"query": f"text {i}", "positive": f"answer to text {i}"} for i in range(3)]


def find(folder: Path, path: str, **settings: Any) -> dict[str, list[dict[str, Any]]]:
    """The datasets that a path stands for, by name, and their rows."""
    found = find_datasets(DatasetSource(path=path, **settings), folder)
    return {location.name: [row.content for row in read_rows(location)] for location in found}


@pytest.mark.parametrize("file", ["train.jsonl", "train.jsonl.gz", "train.json.gz", "train.parquet", "train/0.parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, file: str) -> None:
    write(tmp_path, "retrieval/tiny", ROWS, file)
    assert find(tmp_path, "retrieval/tiny") == {"retrieval/tiny": ROWS}


def test_a_file_a_folder_and_another_split(tmp_path: Path) -> None:
    write(tmp_path, "retrieval/tiny", ROWS)
    write(tmp_path, "retrieval/tiny", ROWS[:2], "dev.jsonl.gz")
    file = write(tmp_path, "", ROWS[:1], "loose.jsonl")
    assert find(tmp_path, "retrieval/tiny", split="dev") == {"retrieval/tiny": ROWS[:2]}
    assert find(tmp_path, "retrieval/tiny/train.jsonl") == {"retrieval/tiny": ROWS}
    assert find(tmp_path, "loose.jsonl") == {"loose": ROWS[:1]}
    assert list(find(tmp_path / "retrieval", str(file)).values()) == [ROWS[:1]]  # from outside the folder


def test_a_pattern_takes_several_datasets_and_names_what_it_passes_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "data [v1]"
    write(folder, "retrieval/a", ROWS[:1])
    write(folder, "retrieval", ROWS, "b.jsonl")
    write(folder, "retrieval/untrained", ROWS, "test.jsonl")
    others = ["README.md", "part-2.jsonl.bz2", "part-3.JSONL", "part-4.json"]
    for name in others:
        (folder / "retrieval" / name).touch()
    with caplog.at_level(logging.WARNING, "mote"):
        assert find(folder, "retrieval/*") == {"retrieval/a": ROWS[:1], "retrieval/b": ROWS}
    skipped = "no 'train' split, and no file that is read here: skipped"
    assert caplog.messages == [f"{folder / 'retrieval' / name}: {skipped}" for name in [*others, "untrained"]]
    assert list(find(folder, "**/train.jsonl")) == ["retrieval/a"]
    assert list(find(folder, "retrieval/*", exclude=["b"])) == ["retrieval/a"]
    assert list(find(folder, "retrieval/*", exclude=["retrieval/a", "a"])) == ["retrieval/b"]
    with pytest.raises(ValueError, match=r"exclude: there is no dataset 'c'.*Available: 'retrieval/a', 'retrieval/b'"):
        find(folder, "retrieval/*", exclude=["c"])
    with pytest.raises(FileNotFoundError, match="There is no dataset"):
        find(folder, "retrieval/*", exclude=["*"])
    with pytest.raises(ValueError, match=r"README.md cannot be read: unknown format, expected one of .jsonl.*\.txt"):
        find(folder, "retrieval/*.md")


def test_missing_datasets_are_named_with_what_is_there(tmp_path: Path) -> None:
    write(tmp_path, "data/retrieval/arxiv", ROWS)
    for path, split, message in (
        ("retrieval/arxive", "train", r"retrieval/arxive with train.jsonl or .*Did you mean 'arxiv'"),
        ("sts/*", "train", r"sts/\* with .*Available: 'retrieval'"),
        ("retrieval/arxiv", "dev", r"retrieval/arxiv with dev.jsonl or .*Available: 'train.jsonl'"),
        ("retrieval", "train", r"retrieval with .*Available: 'arxiv'"),
        ("../nowhere/retrieval", "train", r"nowhere/retrieval with .* In "),
    ):
        with pytest.raises(FileNotFoundError, match=f"There is no dataset .*{message}"):
            find(tmp_path / "data", path, split=split)


@pytest.mark.parametrize(
    "files",
    [
        ["train.jsonl", "train.parquet"],
        ["train-00000-of-00003.parquet", "train-00002-of-00003.parquet"],
        ["train/part-2-of-2.parquet"],
        [f"train-0000{i}-of-0000{i + 1}.jsonl" for i in (0, 1)],
        [f"train-00000-of-00001-{i}abc.jsonl" for i in (0, 1)],
        [f"train-00000-of-00002-{i}abc.jsonl" for i in (0, 1)],
    ],
)
def test_a_split_that_may_not_be_whole_is_refused(tmp_path: Path, files: list[str]) -> None:
    for file in files:
        write(tmp_path, "retrieval/tiny", ROWS, file)
    problem = "in several forms" if "train.jsonl" in files else "with shards missing, or of two exports"
    with pytest.raises(ValueError, match=rf"tiny has its 'train' split {problem} \({files[0]}.*: name the files"):
        find(tmp_path, "retrieval/tiny")
    assert list(find(tmp_path, f"retrieval/tiny/{files[0]}").values()) == [ROWS]


def test_shards_are_read_in_order(tmp_path: Path) -> None:
    for part in range(3):
        write(tmp_path, "retrieval/hashes", [ROWS[part]], f"train-0000{part}-of-00003-{part}abc.parquet")
        write(tmp_path, "retrieval/from_one", [ROWS[part]], f"train-0000{part + 1}-of-00003.jsonl")
    assert find(tmp_path, "retrieval/*") == {"retrieval/from_one": ROWS, "retrieval/hashes": ROWS}


HUB = """
from pathlib import Path

from mote.data.rows import find_datasets, read_rows
from mote.data.settings import DatasetSource

for name in ("user/pairs", "user/pairs/train.jsonl", "user/missing"):
    (location,) = find_datasets(DatasetSource(path="hub:" + name), Path())
    try:
        print(location.name, [(row.where, row.content["query"]) for row in read_rows(location)])
    except FileNotFoundError as error:
        print(error)
"""


@pytest.mark.processes
def test_a_dataset_on_the_hub(tmp_path: Path) -> None:
    write(tmp_path, "hub", ROWS)
    with HubServer() as server:
        server.add_repo("user/pairs", tmp_path / "hub")
        done = run_python(HUB, cwd=tmp_path, environment=server.environment(tmp_path / "home"))
    found, file, missing, *_ = done.stdout.split("\n")
    assert found == f"user/pairs {[(f'user/pairs: row {i}', f'text {i - 1}') for i in (1, 2, 3)]}"
    assert file.startswith("pairs/train [(")
    assert re.findall(r"train.jsonl:(\d)', '(.*?)'", file) == [(str(i), f"text {i - 1}") for i in (1, 2, 3)]
    assert missing.startswith("Dataset 'user/missing' doesn't exist on the Hub")


def test_the_configurations_and_splits_of_a_hub_dataset_are_datasets() -> None:
    for settings, name in (({}, "u/n"), ({"subset": "en"}, "u/n/en"), ({"subset": "en", "split": "paq"}, "u/n/en/paq")):
        assert [one.name for one in find_datasets(DatasetSource(path="hub:u/n", **settings), Path())] == [name]


def test_a_hub_dataset_that_is_also_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "user/pairs", ROWS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="hub:user/pairs is also a folder here"):
        find(tmp_path, "hub:user/pairs")


def test_a_byte_order_mark_blank_lines_and_windows_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "", ROWS)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n\r\n"))
    read = list(read_files([path]))
    assert [row.content for row in read] == ROWS
    assert [row.where for row in read] == [f"{path}:{line}" for line in (1, 3, 5)]
    (tmp_path / "texts.txt").write_bytes("\ufeffone\r\n\u3000\r\n two".encode())
    assert [row.content for row in read_files([tmp_path / "texts.txt"])] == [{"text": "one"}, {"text": "two"}]


def test_lines_without_columns(tmp_path: Path) -> None:
    """As public collections of pairs have them."""
    (tmp_path / "train.jsonl").write_text('["a", "b"]\n["a", "b", "c"]\n{"set": ["a", "b", "c"]}\n{"set": ["a"]}\n')
    pair = {"anchor": "a", "positive": "b"}
    expected = [pair, {**pair, "negative": ["c"]}, {**pair, "positive": ["b", "c"]}, {"set": ["a"]}]
    assert [row.content for row in read_files([tmp_path / "train.jsonl"])] == expected


@pytest.mark.parametrize(
    ("file", "line", "fault"),
    [
        ("train.jsonl", b'{"query": "a", "posi', "invalid JSON (Unterminated string"),
        ("train.jsonl", b'["a"]', "expected a JSON object, got list"),
        ("train.jsonl", b'{"query": "\xff"}', "invalid JSON ('utf-8' codec can't decode"),
        ("texts.txt", "zwölf".encode("latin-1"), "not a text in UTF-8 ("),
        ("texts.txt", "two".encode("utf-16-le"), "not a text in UTF-8 (it has null characters"),
    ],
)
def test_an_invalid_row_is_a_row_with_its_line(tmp_path: Path, file: str, line: bytes, fault: str) -> None:
    path = tmp_path / file
    path.write_bytes(b'{"query": "a"}\n\n' + line + b'\n{"query": "b"}')
    first, invalid, last = read_files([path])
    assert first.content != last.content
    assert (first.fault, invalid.content, last.fault) == ("", {}, "")
    with pytest.raises(ValueError, match=re.escape(f"{path}:3: {fault}")):
        invalid.take(dict)


@pytest.mark.parametrize(
    ("file", "end"), [("train.jsonl.gz", -40), ("train.parquet", -40), ("train.jsonl.gz", 0), ("texts.txt.gz", 0)]
)
def test_a_truncated_file_is_an_error_by_name(tmp_path: Path, file: str, end: int) -> None:
    path = write(tmp_path, "", ROWS * 200, file)
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(ValueError, match=re.escape(f"{path} cannot be read: ")):
        list(read_files([path]))
