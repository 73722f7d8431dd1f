"""Tables, sizes and progress lines."""

import logging
from collections.abc import Iterator

import pytest

from mote.reporting import console_logging, markdown_table, megabytes, millions, table


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("mote.somewhere")
    yield logger
    root = logging.getLogger("mote")
    root.handlers.clear()
    root.setLevel(logging.NOTSET)


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
    console_logging(debug=True)
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
