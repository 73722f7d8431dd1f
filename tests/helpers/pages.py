"""Pages of the documentation, the code in them, and the options of its commands."""

import re
from collections.abc import Iterator
from typing import Any

from helpers.paths import ROOT

from mote.cli import application

DATED = ("changelog.md",)  # what was true when it was written
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "examples").rglob("README.md")),
    *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name not in DATED),
]


def fenced(text: str) -> Iterator[tuple[str, str]]:
    """Find language and code of each fenced block; the language of some is empty."""
    yield from re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(code: str) -> Iterator[str]:
    """Find every `mote …` in a block of shell lines, without its comment; continued lines and brackets included."""
    for command in re.findall(r"(?:^|\| )((?:python -m )?mote .*(?:\n +\S.*)*)", code, re.MULTILINE):
        yield re.sub(r"\s#\s.*", "", command)


def option_types(words: list[str]) -> dict[str, Any]:
    _, apps, _ = application(words).parse_commands(words)
    arguments = apps[-1].assemble_argument_collection(parse_docstring=False)
    return {name: argument.hint for argument in arguments for name in argument.names if name.startswith("--")}
