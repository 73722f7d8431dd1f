"""Hooks of the documentation site (`hooks:` in mkdocs.yml)."""

from collections.abc import Iterator
from typing import Any

import typer

PLACE = "<!-- the commands are put here when the site is built -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the reference of the command line where a page asks for it."""
    return markdown.replace(PLACE, "\n".join(command_reference())) if PLACE in markdown else markdown


def command_reference() -> Iterator[str]:
    """Describe every command and its options, in Markdown, from the definitions that `mote --help` prints."""
    from mote.cli import app

    yield from _describe(typer.main.get_command(app), "mote")


def _describe(command: Any, path: str) -> Iterator[str]:
    commands = getattr(command, "commands", {})
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    if path != "mote":
        yield f"\n## {path}\n\n{command.help or ''}\n"
    if not commands:
        yield f"```\n{' '.join([path, *map(_metavar, arguments), '[OPTIONS]'])}\n```\n"
    if arguments or options:
        yield "| | |\n| --- | --- |"
    for each in arguments:
        yield _row(f"`{_metavar(each)}`", each)
    for each in options:
        names = ", ".join(f"`{name}`" for name in [*each.opts, *each.secondary_opts])
        yield _row(names, each)
    for name, below in commands.items():
        yield from _describe(below, f"{path} {name}")


def _metavar(argument: Any) -> str:
    return argument.metavar or argument.name.upper()


def _row(names: str, parameter: Any) -> str:
    default = parameter.default
    plain = isinstance(default, str | int | float) and not isinstance(default, bool) and default != ""
    shown = f" Default: {default}." if plain and "Default" not in (parameter.help or "") else ""
    metavar = f" {parameter.metavar}" if parameter.metavar and parameter.param_type_name == "option" else ""
    choices = f" One of {', '.join(parameter.type.choices)}." if getattr(parameter.type, "choices", None) else ""
    text = f"{'Required. ' if parameter.required and metavar else ''}{parameter.help or ''}{choices}{shown}"
    return f"| {names}{metavar} | {text} |"
