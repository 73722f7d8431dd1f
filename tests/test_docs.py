"""The table of settings in docs/training.md is that of the code."""

import json
import re
from collections.abc import Iterator
from typing import Any, get_args

from helpers.paths import ROOT
from pydantic import BaseModel

import mote
from mote.training.recipe import Recipe, shipped_recipes
from mote.training.train import train

GUIDE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


def settings_in(annotation: Any) -> type[BaseModel] | None:
    """The class of settings that an annotation is about, as in `list[DatasetSettings]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(settings_in, get_args(annotation))), None)


def all_settings(settings: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Name every key of a recipe, with its default."""
    for name, field in settings.model_fields.items():
        inside = settings_in(field.annotation)
        if inside is not None:
            yield from all_settings(inside, prefix + name + {"tasks": ".TASK", "datasets": "[]"}.get(name, "") + ".")
        elif field.is_required():
            yield prefix + name, "required"
        elif field.default == "":
            yield prefix + name, "empty"
        else:
            default = field.default if isinstance(field.default, str) else json.dumps(field.default)
            yield prefix + name, f"`{default}`".replace("e-06", "e-6")


def test_every_setting_is_in_the_table_with_its_default() -> None:
    table = GUIDE.split("## All settings", 1)[1]
    assert re.findall(r"^\| `([^`]+)` \| ([^|]+) \| .*\w.* \|$", table, re.MULTILINE) == list(all_settings(Recipe))


def test_every_shipped_recipe_is_listed() -> None:
    table = GUIDE.split("## Recipes", 1)[1].split("## Data", 1)[0]
    rows = [line.split(" | ", 1)[0] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`([\w-]+)`", " ".join(rows))) == shipped_recipes()


def test_the_way_in_from_python() -> None:
    assert mote.train is train
