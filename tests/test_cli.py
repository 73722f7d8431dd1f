"""The command line itself: help, exit statuses, errors, signals. What the verbs do is tested with what they call."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from helpers.pages import option_types
from helpers.paths import ROOT, SMALL_ENCODER
from helpers.processes import run_python

from mote.cli import GROUPS, GUIDES, VERBS, application, main


@pytest.mark.parametrize("words", [[], ["experts"], *(name.split() for name in VERBS)], ids=" ".join)
def test_every_verb_has_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(" ".join(["Usage: mote", *words]))
    if not words:
        places = [text.index(f" {title} ") for title in GROUPS]
        assert places == sorted(places)  # the daily ones first
    elif words != ["experts"]:
        for name in option_types(words):
            assert f" {name} " in text, name
        page, example = GUIDES[" ".join(words)]
        assert f"Example: mote {' '.join(words)} {example} Guide: docs/{page}.md " in text
        assert (ROOT / "docs" / f"{page}.md").is_file()
        application(words).parse_args([*words, *example.split()], exit_on_error=False, print_error=False)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "mote 0.1.0\n"


@pytest.mark.long  # in CI: an import comes back easily
def test_help_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = """
import sys
from mote.cli import main
assert main(["--help"]) == main(["upcycle", "--help"]) == main(["evaluate", "--help"]) == 0
assert not {"torch", "transformers", "numpy", "datasets"} & sys.modules.keys()
assert main(["embed", "--help"]) == main(["mine", "--help"]) == 0
assert not {"torch", "transformers", "datasets"} & sys.modules.keys()
"""
    run_python(code, cwd=tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("upcycl", 'Unknown command "upcycl". Did you mean "upcycle"?'),
        ("experts lst", 'Unknown command "lst". Did you mean "list"?'),
        ("upcycle", 'Command "upcycle" parameter --src requires an argument.'),
        ("upcycle --src x --pooling-heads 0", "--pooling-heads: Input should be greater"),
        ("upcycle --src x --task a=b --task a=c", "'a=c': expected NAME=VALUE, each name once"),
        ("interpolate x --weight 0.5 --weight 0.7", "'0.5': expected NAME=VALUE, each name once"),
        ("interpolate x --weight clustering=", "Invalid value for --weight"),
        ("memory x --batch-size 1.5 --length 1", "Invalid value for --batch-size"),
        ("interpolate a b --weight 0.5 --out c", "Unused Tokens: ['b']."),
    ],
)
def test_usage_errors_have_status_2(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert error.endswith("--help`)\n")
    assert error.count("\n") == 1


def test_unexpected_errors_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("mote.training.memory.open_checkpoint", fail)
    words = ["memory", "x", "--batch-size", "1", "--length", "1"]
    assert main(words) == 1
    assert capsys.readouterr().err == "error: RuntimeError: two lines (`MOTE_DEBUG=1 mote …` prints the traceback)\n"
    monkeypatch.setenv("MOTE_DEBUG", "0")
    assert main(words) == 1
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("MOTE_DEBUG", "1")
    assert main(words) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.processes
def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    for words, library, extra in (
        (["train", "smoke"], "datasets", "train"),
        (["evaluate", "x", "--data", "y"], "mteb", "evaluate"),
    ):
        code = f"import sys; sys.modules[{library!r}] = None; from mote.cli import main; sys.exit(main({words}))"
        done = run_python(code, cwd=tmp_path, status=1)
        assert re.match(f"error: .*{library}.*: ", done.stderr)
        assert f'pip install "mote-embeddings[{extra}]"' in done.stderr


@pytest.mark.processes
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_clean_up(number: signal.Signals, status: int, tmp_path: Path) -> None:
    code = """
import sys, time
from mote import cli
from mote.checkpoints import writing
def wait(*_, **__):
    print("writing", flush=True)
    time.sleep(60)
writing.new_card = wait
sys.exit(cli.main())
"""
    command = [sys.executable, "-c", code, "upcycle", "--src", str(SMALL_ENCODER), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while process.stdout.readline() != "writing\n":
        assert process.poll() is None, process.communicate()
    time.sleep(0.1)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert errors.splitlines()[-1] == "interrupted: no partial result was left behind"
    assert "Traceback" not in errors
    assert os.listdir(tmp_path) == []  # noqa: PTH208


VALUES = ["", "-1", "0", "nan", "1e999", "9" * 30, "many", "a=b=c", "=", "../..", "two\nlines", "🐋", "\0", "--"]
SOURCES = ["/nowhere", "/dev/null", "", ".", "\0", "user/name/more", "x" * 5000, "two\nlines", "user/name"]


def wrong_command_lines(verb: list[str], rest: list[str]) -> Iterator[list[str]]:
    """Vary a command line in every place; SRC is still to be replaced, `rest` is all that the verb requires."""
    options = [name for name, hint in option_types(verb).items() if bool not in (hint, *get_args(hint))]
    yield from ([*verb, *rest[:index], *rest[index + 1 :]] for index in range(len(rest)))  # a word missing
    yield from ([*verb, *rest, option + "x", "value"] for option in options)  # mistyped
    yield from ([*verb, *rest, option] for option in options)  # no value
    yield from ([*verb, *rest, option, VALUES[index % len(VALUES)]] for index, option in enumerate(options * 2))
    yield [*verb, *rest, "--spoon"]
    yield from ([*verb, *(source if word == "SRC" else word for word in rest)] for source in SOURCES)


QUICK = ["upcycle --src SRC", "train SRC", "average SRC --out OUT", "card SRC"]
LONG = [
    "embed SRC SRC --out OUT",
    "evaluate SRC --data SRC",
    "experts add SRC mean --name x --out OUT",
    "analyze SRC",
    "mine SRC --model bm25 --out OUT",
    "serve SRC",
]
SLOW = [
    "filter SRC --model bm25 --out OUT",
    "interpolate SRC --out OUT --weight 0.5",
    "export SRC --out OUT --expert a",
    "compress SRC --out OUT --rank 1",
    "set SRC --default-task a",
    "memory SRC --batch-size 8 --length 8",
    "push SRC user/name",
    "experts list SRC",
    "experts extract SRC a --out OUT",
    "experts merge SRC a b --name x --out OUT",
    "experts remove SRC a --out OUT",
    "experts rename SRC a b --out OUT",
]


@pytest.mark.parametrize(
    "line",
    [
        *QUICK,
        *(pytest.param(line, marks=pytest.mark.long) for line in LONG),
        *(pytest.param(line, marks=pytest.mark.slow) for line in SLOW),
    ],
)
def test_wrong_command_lines_end_in_one_line(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hundreds of them, in all."""
    monkeypatch.chdir(tmp_path)
    words = line.split()
    verb = words[:2] if words[0] == "experts" else words[:1]
    for wrong in wrong_command_lines(verb, words[len(verb) :]):
        status = main(wrong)
        *warnings, error = capsys.readouterr().err.splitlines()
        assert status in (1, 2), wrong
        assert error.startswith("error: "), wrong
        assert all(line.startswith("warning: ") for line in warnings), (wrong, warnings)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", range(3))
def test_a_flag_may_stand_among_arguments(place: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.limit=40", f"output={tmp_path / 'run'}"]
    words.insert(place, "--dry-run")
    assert main(["train", "smoke", *words]) == 0
    assert "Dry run: nothing was trained." in capsys.readouterr().out


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    line = "mote-best: an expert for search and text matching"
    for words in (["--list"], ["--help"]):
        assert main(["train", *words]) == 0
        assert line in capsys.readouterr().out
    assert main(["pretrain", "--list"]) == 0
    assert "- mlm: masked language modelling" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["-q", "upcycle"], ["upcycle", "-q"]])
def test_quiet(words: list[str], dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, str(dense), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == ""
    assert (tmp_path / "out" / "config.json").is_file()
