"""Whether a model pools the tokens of its instructions, a setting in Sentence-Transformers' files."""

from pathlib import Path
from typing import Any

from mote.checkpoints.retrieval import MODULES, TRANSFORMER_SETTINGS, copy_code, name_of, retrieval_in
from mote.files import read_json, write_json
from mote.remote.configuration_mote import alternatives

POOLED = ("included", "excluded", "excluded_by_count")
SETTING = "instruction_pooling"

TEXT_POOLING = "instruction_mote.TextPooling"
_LIBRARY_POOLING = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
# First module of a model that pools all tokens → of a model that leaves instructions out.
_INSTRUCTED = {
    "Transformer": "instruction_mote.InstructedTransformer",
    "MoTETransformer": "task_instruction_mote.InstructedMoTETransformer",
}
_PLAIN = {
    "InstructedTransformer": "sentence_transformers.base.modules.transformer.Transformer",
    "InstructedMoTETransformer": "sentence_transformer_mote.MoTETransformer",
}
_POOLINGS = ("Pooling", "TextPooling")
INSTRUCTED = tuple(_INSTRUCTED.values())


def check_instruction_pooling(value: str, vectors: str = "dense") -> str:
    """Return the value if it is one of `POOLED` and fits the kind of vectors, else raise `ValueError`."""
    if value not in POOLED:
        raise ValueError(f"Unknown {SETTING} {value!r}." + alternatives(str(value), POOLED))
    if value != "included" and vectors != "dense":
        raise ValueError(f"Instructions can only be left out of the pooling of dense vectors, got {vectors} ones")
    return value


def instruction_pooling_in(folder: Path) -> str:
    """Read whether a model pools its instructions, as one of `POOLED`."""
    if not (folder / MODULES).is_file() or name_of(read_json(folder / MODULES, list)[0]) not in _PLAIN:
        return "included"
    return str(read_json(folder / TRANSFORMER_SETTINGS).get(SETTING, "excluded"))


def write_instruction_pooling(folder: Path, value: str) -> dict[str, Any]:
    """Rewrite Sentence-Transformers' files in a folder, so that its model does or does not pool its instructions.

    Args:
        folder: A model with these files, and with the code of its modules.
        value: One of `POOLED`.

    Returns:
        No details for `mote.json`: the setting is already recorded with the step.

    Raises:
        ValueError: If the model's vectors are not dense, or it has no module that pools.
    """
    modules = read_json(folder / MODULES, list)
    settings = read_json(folder / TRANSFORMER_SETTINGS)
    settings.pop(SETTING, None)
    if check_instruction_pooling(value, retrieval_in(folder).kind) != "included":
        settings[SETTING] = value
    types = _PLAIN if value == "included" else _INSTRUCTED
    pooled = False
    for index, module in enumerate(modules):
        if index == 0:
            module["type"] = types.get(name_of(module), module["type"])
        elif "include_prompt" in (own := _settings_of(module, folder)) or name_of(module) in _POOLINGS:
            pooled = True
            write_json(folder / module["path"] / "config.json", {**own, "include_prompt": value == "included"})
            if name_of(module) in _POOLINGS:
                module["type"] = _LIBRARY_POOLING if value == "included" else TEXT_POOLING
    if not pooled and value != "included":
        raise ValueError(f"{folder.name} has no module that pools tokens, so no instruction can be left out of it")
    write_json(folder / MODULES, modules)
    write_json(folder / TRANSFORMER_SETTINGS, settings)
    copy_instruction_code(modules, folder)
    return {}


def first_module(module_type: str, source: str) -> str:
    """Return the first module's type, or, if the source's module leaves instructions out, its counterpart that does."""
    return _INSTRUCTED[name_of({"type": module_type})] if name_of({"type": source}) in _PLAIN else module_type


def copy_instruction_code(modules: list[dict[str, Any]], folder: Path) -> None:
    """Copy the code of the modules that leave instructions out into a model's folder, and no other such code."""
    wanted = {module["type"] for module in modules}
    for name in (*INSTRUCTED, TEXT_POOLING):
        (folder / f"{name.partition('.')[0]}.py").unlink(missing_ok=True)
    for name in wanted.intersection((*INSTRUCTED, TEXT_POOLING)):
        for file in (name, TEXT_POOLING):  # which all of them import
            copy_code(file, folder)


def _settings_of(module: dict[str, Any], folder: Path) -> dict[str, Any]:
    path = folder / module["path"] / "config.json"
    return dict(read_json(path)) if path.is_file() else {}
