"""Hooks of the documentation site (`hooks:` in mkdocs.yml): references that come from the code."""

import contextlib
import importlib
import io
import os
import re
from collections.abc import Iterator
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace `<!-- commands -->`, `<!-- names of MODULE -->`, and links to files that are not part of the site."""
    markdown = re.sub(r"\[([^\]]+)\]\(\.\./((?:examples|src|tests|scripts|research)/[^)]+)\)", r"\1 (`\2`)", markdown)
    if "<!-- commands -->" in markdown:
        markdown = markdown.replace("<!-- commands -->", "\n".join(command_reference()))
    return re.sub(r"<!-- names of ([\w.]+) -->", lambda found: "\n\n".join(name_reference(found[1])), markdown)


def command_reference() -> Iterator[str]:
    """Give every command a heading and the output of its `--help`."""
    from mote.cli import command_tree, main

    def describe(command: Any, words: list[str]) -> Iterator[str]:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            main([*words, "--help"])
        yield f"\n## {' '.join(['mote', *words])}\n\n```text\n{output.getvalue().strip()}\n```\n"
        for name, below in getattr(command, "commands", {}).items():
            yield from describe(below, [*words, name])

    os.environ["COLUMNS"] = "100"
    yield from describe(command_tree(), [])


def name_reference(module: str) -> Iterator[str]:
    """Refer to the documentation of a module's public names."""
    home = importlib.import_module(module)
    for name in getattr(home, "__all__", ()):
        thing = getattr(home, name)
        own_module = getattr(thing, "__module__", "")
        # Classes of the model have a page of their own.
        if own_module.startswith("mote.") and not own_module.startswith("mote.remote."):
            yield f"::: {own_module}.{thing.__qualname__}"
