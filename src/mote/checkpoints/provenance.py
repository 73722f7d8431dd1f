"""How a model was made: `mote.json`, a list of steps, and the command lines in it."""

import os
import platform
import shlex
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mote.files import read_json, write_json

RECORD_FILE = "mote.json"
FORMAT = 1  # readers refuse later formats


def new_step(
    step: str,
    *,
    command: str | None = None,
    sources: Iterable[dict[str, Any]] = (),
    settings: Mapping[str, Any] | None = None,
    **details: Any,
) -> dict[str, Any]:
    """Describe one step ("upcycle", "train" …), made now, with the installed versions and details as JSON."""
    libraries = ("mote-embeddings", "torch", "transformers", "sentence-transformers")
    return {
        "step": step,
        **({"command": command} if command else {}),
        "sources": list(sources),
        "settings": plain(dict(settings or {})),
        **plain(details),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in libraries}},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Read the steps by which the model in a folder was made, oldest first; empty without `mote.json`."""
    return _read_record(folder)["steps"]


def recorded_files(folder: Path) -> list[str]:
    """Read the names of the files that were written with a folder's `mote.json`; errors as from `read_steps`."""
    return _read_record(folder)["files"]


def write_steps(steps: list[dict[str, Any]], folder: Path) -> None:
    """Write `mote.json`; it lists the files in the folder, so it has to be written last."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    record = {"format": FORMAT, "steps": steps, "files": sorted({*names, RECORD_FILE})}
    write_json(folder / RECORD_FILE, record)


def _read_record(folder: Path) -> dict[str, Any]:
    path = folder / RECORD_FILE
    empty: dict[str, Any] = {"format": FORMAT, "steps": [], "files": []}
    record = {**empty, "format": None, **read_json(path)} if path.is_file() else empty
    if record["format"] != FORMAT:
        raise ValueError(f"{path} has format {record['format']}; this version of mote reads {FORMAT}: update mote")
    return record


def command_line(*words: str, **options: Any) -> str:
    """Build a command line of `mote`, without local paths.

    A list or dict becomes a repeated option in the singular (`tasks={"a": "b"}`: `--task a=b`), a bool a flag.
    """
    line = ["mote", *words]
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            line.append(option if value else option.replace("--", "--no-", 1))
        elif isinstance(value, Mapping | list | tuple):
            line += [word for one in as_words(value) for word in (option.removesuffix("s"), one)]
        elif value is not None:
            line += [option, *as_words(value)]
    return shlex.join(line)


def as_words(value: Any) -> list[str]:
    """Write a value, or each of several, as on a command line: a mapping as `name=value`."""
    if isinstance(value, Mapping):
        return [f"{plain(name)}={'' if one is None else as_words(one)[0]}" for name, one in value.items()]
    if isinstance(value, list | tuple):
        return [word for one in value for word in as_words(one)]
    return [f"{value:g}" if isinstance(value, float) else str(plain(value))]


def plain(value: Any) -> Any:
    """Turn a value into JSON without local paths: folders become their names, objects their public names.

    A mapping of tensors (the weights of an expert) becomes the word "weights".
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | Path):
        is_path = isinstance(value, Path) or ("/" in value and os.path.exists(value))  # noqa: PTH110  # texts, too
        return Path(value).resolve().name if is_path else value
    if hasattr(value, "public_name"):
        return value.public_name
    if isinstance(value, Mapping):
        has_tensors = any(hasattr(one, "dtype") for one in value.values())
        return "weights" if has_tensors else {str(plain(key)): plain(one) for key, one in value.items()}
    if isinstance(value, Iterable) and not hasattr(value, "dtype"):
        return [plain(one) for one in value]
    return str(value)
