"""Pages of the documentation, and the code in them."""

import re
from collections.abc import Iterator

from helpers.paths import ROOT

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
