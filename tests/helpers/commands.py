"""The options of the command line."""

from typing import Any

from mote.cli import application


def option_types(words: list[str]) -> dict[str, Any]:
    _, apps, _ = application(words).parse_commands(words)
    arguments = apps[-1].assemble_argument_collection(parse_docstring=False)
    return {name: argument.hint for argument in arguments for name in argument.names if name.startswith("--")}
