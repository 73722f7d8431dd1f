"""What the documentation says is so: commands, options, settings, architectures, pages."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pkgutil import resolve_name

import pytest
from helpers import pages
from helpers.pages import option_types
from helpers.paths import ROOT

from mote.cli import VERBS
from mote.remote.configuration_mote import ARCHITECTURES
from mote.settings import Settings
from mote.training.pretraining_recipe import PretrainingRecipe
from mote.training.recipe import Recipe, shipped_recipes
from mote.upcycling.options import UpcyclingOptions
from scripts import mkdocs_hooks

GUIDE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


def documented_commands() -> Iterator[tuple[str, str]]:
    for page in pages.PAGES:
        text = page.read_text(encoding="utf-8")
        for code in [*(code for _, code in pages.fenced(text)), *re.findall(r"`(mote [^`\n]+)`", text)]:
            for command in pages.commands(code):
                yield page.name, command


@pytest.mark.long
def test_documented_commands_exist_with_their_options() -> None:
    commands = list(documented_commands())
    assert len(commands) > 20
    for page, text in commands:
        words = text.removeprefix("python -m ").split()[1:]
        verb = words[: 2 if words[0] == "experts" else 1]
        if verb[-1:] == ["…"] or verb[-1].startswith("--"):
            continue
        assert " ".join(verb) in VERBS, (page, text)
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", " ".join(words)))
        assert options <= {*option_types(verb), "--help"}, (page, text)


def test_documented_names_exist() -> None:
    texts = (page.read_text(encoding="utf-8") for page in pages.PAGES)
    names = {name for text in texts for name in re.findall(r"\bmote(?:\.[A-Za-z_]+)+", text)}
    for name in names - {"mote.json", "mote.md"}:
        if name.startswith("mote.integrations."):  # their libraries may be missing: tests/integrations imports them
            assert find_spec(".".join(name.split(".")[:3])) is not None, name
            continue
        try:
            resolve_name(name)
        except (AttributeError, ImportError):
            pytest.fail(f"There is no {name}")


def test_every_architecture_is_listed() -> None:
    page = (ROOT / "docs" / "upcycling.md").read_text(encoding="utf-8")
    listed = page.split("## Architectures", 1)[1].split("Others", 1)[0]
    assert re.findall(r"`([\w-]+)`", listed) == list(ARCHITECTURES)


@pytest.mark.parametrize("settings", [Recipe, PretrainingRecipe, UpcyclingOptions])
def test_every_setting_is_described(settings: type[Settings]) -> None:
    shown = list(mkdocs_hooks.all_settings(settings))
    assert len(shown) > 30
    assert not [key for key, _, text in shown if not text.endswith(".")]


def test_every_shipped_recipe_is_listed() -> None:
    pretraining = (ROOT / "docs" / "pretraining.md").read_text(encoding="utf-8").split("## The recipe", 1)[0]
    training = GUIDE.split("## Recipes", 1)[1].split("## Data", 1)[0]
    for table, kind in ((training, Recipe), (pretraining, PretrainingRecipe)):
        rows = [line.split(" | ", 1)[0] for line in table.splitlines() if line.startswith("| `")]
        assert sorted(re.findall(r"`([\w-]+)`", " ".join(rows))) == shipped_recipes(kind.PLACE)
