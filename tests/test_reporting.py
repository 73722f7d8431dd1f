"""Tables, sizes and progress lines."""

import logging
from pathlib import Path

import pytest

from mote.reporting import console_logging, labelled_models, markdown_table, megabytes, millions, name_models, table


@pytest.fixture
def logger() -> logging.Logger:
    return logging.getLogger("mote.somewhere")


def test_the_first_column_is_aligned_left_and_the_others_right() -> None:
    assert table(["name", "n"], [["a", 1], ["longer", 22]]) == "name     n\n------  --\na        1\nlonger  22"


def test_alignment_can_be_given() -> None:
    assert table(["n", "name"], [[10, "a"]], align="rl") == " n  name\n--  ----\n10  a"


def test_wide_characters_take_two_columns() -> None:
    assert table(["task", "n"], [["検索", 1], ["ab", 2]]).splitlines()[2:] == ["検索  1", "ab    2"]


def test_a_table_without_rows_has_a_header() -> None:
    assert table(["a", "b"], []) == "a  b\n-  -"


def test_rows_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"zip\(\)"):
        table(["a", "b"], [["only one"]])


def test_markdown_escapes_pipes_and_line_breaks() -> None:
    assert markdown_table(["a", "b"], [["x|y", "1\n2"]]) == "| a | b |\n| --- | ---: |\n| x\\|y | 1 2 |"


def test_sizes() -> None:
    assert megabytes(175_400_000) == "175.4 MB"
    assert millions(1_234_567_890) == "1,234.6 M"


def test_progress_goes_to_stdout_and_warnings_to_stderr(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    console_logging()
    logger.info("100 %% of %d", 3)
    logger.debug("not shown")
    logger.warning("odd")
    assert capsys.readouterr() == ("100 % of 3\n", "warning: odd\n")


def test_a_second_call_does_not_print_twice(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    console_logging()
    console_logging(logging.DEBUG)
    logger.debug("once")
    assert capsys.readouterr().out == "once\n"


def test_only_the_first_process_prints_progress(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    console_logging()
    logger.info("step 1")
    logger.warning("odd")
    assert capsys.readouterr() == ("", "warning: odd\n")


def test_progress_can_go_to_stderr(logger: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    console_logging().progress = "stderr"
    logger.info("step 1")
    assert capsys.readouterr() == ("", "step 1\n")


@pytest.mark.parametrize(
    ("places", "labels"),
    [
        (["a/run1/model", "a/run2/model", "other", "user/model"], ["run1", "run2", "other", "user/model"]),
        (["a/run/model", "b/run/model", "b/run"], ["a/run", "model", "b/run"]),
        (["a/one", "b/one", "x=b/two", "y=b/two"], ["a/one", "b/one", "x", "y"]),
        (["lr=0.1/model", "best=lr=0.1/model", "=lr=0.1"], ["model", "best", "lr=0.1"]),
        (["best=user/name", "user/name"], ["best", "user/name"]),
    ],
)
def test_models_are_called_by_the_ends_of_their_paths_or_by_labels(
    places: list[str], labels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("a/run1/model", "a/run2/model", "a/run/model", "b/run/model", "a/one", "b/one", "b/two", "other"):
        Path(place).mkdir(parents=True)
    Path("lr=0.1/model").mkdir(parents=True)
    named = name_models(places)
    assert list(named) == labels
    assert all(place.endswith(model) for place, model in zip(places, named.values(), strict=True))


def test_one_model_several_or_labelled_ones() -> None:
    assert labelled_models("user/name") == labelled_models(["user/name"]) == {"user/name": "user/name"}
    assert labelled_models(Path("run")) == {"run": "run"}
    assert labelled_models({"a": Path("x"), "b": "y"}) == {"a": "x", "b": "y"}


def test_labels_that_do_not_tell_models_apart(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    one = str(tmp_path / "one")
    for words, said in (
        ([one, one], "one is given twice"),
        ([one, "one=user/name"], r"Two models have the same label \(one, one\): choose others, as in LABEL=MODEL"),
        (["one="], "'one=' names no model: expected MODEL or LABEL=MODEL"),
    ):
        with pytest.raises(ValueError, match=said):
            name_models(words)
