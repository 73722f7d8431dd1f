"""Tables, sizes and progress lines."""

import logging
from pathlib import Path
from typing import Any

import pytest

from mote.reporting import console_logging, label_models, megabytes, millions, table

LOGGER = logging.getLogger("mote.somewhere")


def test_a_table_is_markdown_and_its_columns_line_up() -> None:
    """The first column is aligned left and the others right; wide characters take two columns."""
    assert table(["name", "n"], [["検索", 1], ["[b] :x:", 22]]).splitlines() == [
        "| name    |  n |",
        "|---------|---:|",
        "| 検索    |  1 |",
        "| [b] :x: | 22 |",
    ]
    assert table(["n", "name"], [[10, "x|y\nz"]], align="rl").splitlines()[1:] == [
        "|---:|--------|",
        r"| 10 | x\|y z |",
    ]
    assert table(["a", "b"], []) == "| a | b |\n|---|--:|"


def test_sizes() -> None:
    assert megabytes(175_400_000) == "175.4 MB"
    assert millions(1_234_567_890) == "1,234.6 M"


@pytest.mark.parametrize(
    ("rank", "printed"),
    [
        ("0", ("100 % of 3\n", "warning: odd\n")),
        ("1", ("", "warning: odd\n")),  # only the first process prints progress
    ],
)
def test_log_lines(
    rank: str,
    printed: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(logging.root, "handlers", [])
    console_logging()
    console_logging()  # a second call does not print twice
    logging.warning("theirs")  # as libraries do, which configures logging if it has no handler
    assert capsys.readouterr() == ("", "theirs\n")
    LOGGER.info("100 %% of %d", 3)
    LOGGER.debug("not shown")
    LOGGER.warning("odd")
    assert capsys.readouterr() == printed


def test_models_are_called_by_their_folders_or_by_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("a/run1/model", "a/run2/model", "a/one", "b/two", "other", "lr=0.1/model"):
        Path(place).mkdir(parents=True)
    cases: list[tuple[Any, list[str]]] = [
        ("user/name", ["user/name"]),
        (Path("other"), ["other"]),
        ({"a": Path("other"), "b": "user/name"}, ["a", "b"]),
        (["a/run1/model", "a/run2/model", "other", "user/model"], ["run1", "run2", "other", "user/model"]),
        (["a/one", "x=b/two", "y=b/two"], ["one", "x", "y"]),
        (["lr=0.1/model", "best=lr=0.1/model"], ["lr=0.1", "best"]),
        (["best=user/name", "user/name"], ["best", "user/name"]),
    ]
    for places, labels in cases:
        named = label_models(places)
        assert list(named) == labels
        assert all("=" not in model or Path(model).is_dir() for model in named.values())
    for words in (["one", "one"], ["one", "one=user/name"]):
        with pytest.raises(ValueError, match="Two models have the label 'one': give one another, as in LABEL=MODEL"):
            label_models(words)
