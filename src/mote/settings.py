"""Base class of options: a recipe, the command line and a Python function read the same class.

A field has its name, type and default; the class's docstring describes it under `Attributes:`.
"""

import inspect
import re
from collections import ChainMap
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from typing_extensions import Self

from mote.files import expanded


def alternatives(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown `name`: the nearest known name, then all known names."""
    from mote.remote import configuration_mote  # and with it transformers, for which `mote --help` should not wait

    return configuration_mote.alternatives(name, known)


class Settings(BaseModel):
    """Settings in which a mistyped name is an error that suggests the nearest known one."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, settings: Any) -> Any:
        for key in settings if isinstance(settings, dict) and cls.model_config["extra"] == "forbid" else ():
            if key not in cls.model_fields:
                raise ValueError(f"unknown key {key!r}." + alternatives(key, cls.model_fields))
        if not isinstance(settings, dict):
            return settings
        # In a recipe, null removes the entries of the one that it extends.
        empty = {name for name, field in cls.model_fields.items() if field.default == {} and settings.get(name) is None}
        return {key: expanded(value) for key, value in settings.items() if key not in empty}

    def conflicts(self) -> Iterable[str]:
        """Name settings that cannot be used together."""
        return ()

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        if found := [*self.conflicts()]:
            raise ValueError("; ".join(found))
        return self

    def updated(self, **changes: Any) -> Self:
        """Return a copy with changes, which are validated; fields that were not set stay unset."""
        return type(self)(**{**self.model_dump(exclude_unset=True), **changes})


def descriptions(settings: type[Settings]) -> dict[str, str]:
    """Return the description of each field, from its class or the class that it is inherited from."""
    found = ChainMap(*(documented(each, "Attributes") for each in settings.__mro__))
    return {name: found[name] for name in settings.model_fields}


def documented(thing: Any, section: str) -> dict[str, str]:
    """Return name → description of what a section of a Google docstring lists, such as `Args` or `Attributes`."""
    _, _, listed = inspect.cleandoc(thing.__doc__ or "").partition(f"\n{section}:\n")
    listed = listed.partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", listed, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def error_messages(error: ValidationError) -> list[tuple[str, str]]:
    """Return the dotted key and the message of each error, with the value if the message does not name it."""
    found = []
    for fault in error.errors():
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] != "value_error" and isinstance(fault["input"], str | int | float):
            message += f", got {fault['input']!r}"
        found.append((".".join(map(str, fault["loc"])), message))
    return found
