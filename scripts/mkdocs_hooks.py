"""Hooks of the documentation site (`hooks:` in mkdocs.yml): references that come from the code."""

import contextlib
import importlib
import io
import json
import os
import re
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any, get_args

LAST_IN_SEARCH = ("results.md", "performance.md", "changelog.md")  # their tables hold every word
PARTS = {"tasks": ".TASK", "datasets": "[]"}  # settings that hold several of their class → how one is written


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    """Replace comments such as `<!-- commands -->` by references, and links to files that are not part of the site."""
    if page is not None and page.file.src_uri in LAST_IN_SEARCH:
        page.meta.setdefault("search", {"boost": 0.1})
    markdown = re.sub(r"\[([^\]]+)\]\(\.\./((?:examples|src|tests|scripts|research)/[^)]+)\)", r"\1 (`\2`)", markdown)
    if "<!-- commands -->" in markdown:
        markdown = markdown.replace("<!-- commands -->", "\n".join(command_reference()))
    markdown = re.sub(r"<!-- settings of ([\w.]+) -->", lambda found: settings_reference(found[1]), markdown)
    return re.sub(r"<!-- names of ([\w.]+) -->", lambda found: "\n\n".join(name_reference(found[1])), markdown)


def command_reference() -> Iterator[str]:
    """Give every command a heading and the output of its `--help`."""
    from mote.cli import VERBS, main

    os.environ["COLUMNS"] = "100"
    for name in ["", "experts", *VERBS]:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            main([*name.split(), "--help"])
        yield f"\n## {f'mote {name}'.strip()}\n\n```text\n{output.getvalue().strip()}\n```\n"


def name_reference(module: str) -> Iterator[str]:
    """Refer to the documentation of a module's public names."""
    home = importlib.import_module(module)
    for name in getattr(home, "__all__", dir(home)):
        thing = getattr(home, name)
        own_module = getattr(thing, "__module__", "")
        # Classes of the model have a page of their own.
        if own_module.startswith("mote.") and not own_module.startswith("mote.remote."):
            yield f"::: {own_module}.{thing.__qualname__}"


def settings_reference(name: str) -> str:
    """Lay out a table of all settings of a recipe, from its class and those of its parts."""
    rows = [f"| `{key}` | {default} | {text} |" for key, default, text in all_settings(resolve_name(name))]
    return "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows])


def all_settings(settings: Any, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Name every key of a recipe, with its default and its description."""
    from mote.settings import descriptions

    texts = descriptions(settings)
    for name, field in settings.model_fields.items():
        inside = settings_in(field.annotation)
        if inside is not None:
            yield from all_settings(inside, f"{prefix}{name}{PARTS.get(name, '')}.")
        elif name not in getattr(settings, "WITHOUT_EFFECT", ()):
            default = field.default if isinstance(field.default, str) else json.dumps(field.default, default=str)
            yield prefix + name, "required" if field.is_required() else f"`{default}`", texts[name]


def settings_in(annotation: Any) -> Any:
    """Return the class of settings that an annotation is about, as in `list[DatasetSettings]`; None: there is none."""
    if hasattr(annotation, "model_fields"):
        return annotation
    return next(filter(None, map(settings_in, get_args(annotation))), None)
