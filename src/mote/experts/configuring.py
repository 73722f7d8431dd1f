"""Settings of a MoTE on disk that decide which expert a text goes to, and which instruction is put in front of it."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mote.checkpoints.definitions import instruction_with
from mote.checkpoints.models import load_tokenizer
from mote.checkpoints.options import WriteOptions
from mote.checkpoints.reading import open_mote
from mote.checkpoints.st_settings import INSTRUCTION_POOLING, POOLED, write_instruction_pooling
from mote.checkpoints.tokens import with_end_token
from mote.checkpoints.transform import Verb, transform
from mote.remote.configuration_mote import require_known

if TYPE_CHECKING:
    from mote.remote.modeling_mote import MoTEModel

EXPERT = "expert."  # and the task, as in "expert.sts"
INSTRUCTION = "instruction."  # and the task, as in "instruction.clustering"
DEFINITION = "definition."  # the same; `mote.instruction_with` turns the definition into the instruction
END_TOKEN = "end_token"
KEYS = ("default_task", "route_by_text", INSTRUCTION_POOLING, END_TOKEN)
PREFIXES = {EXPERT: "tasks", INSTRUCTION: "instructions", DEFINITION: "instructions"}

_UNCHANGED: Any = object()


def configure(
    src: str | Path,
    out: str | Path | None = None,
    *,
    default_task: str | None = _UNCHANGED,
    route_by_text: bool | None = None,
    tasks: Mapping[str, str] | None = None,
    instructions: Mapping[str, str] | None = None,
    instruction_pooling: str | None = None,
    end_token: str | None = None,
    revision: str | None = None,
    options: WriteOptions | None = None,
) -> Path:
    """Set how a MoTE on disk finds the task of a text, and its instructions; prompts, card and `mote.json` are updated.

    Weights stay unchanged. A model in memory has the same settings in `model.config`.

    Args:
        src: A MoTE: a folder or an id on the Hub.
        out: Folder to write. Default: the source itself, which stays as it is if anything fails.
        default_task: Task of texts for which none is given. None: no default, so that such texts are an error. No
            instruction is put in front of them.
        route_by_text: Whether an instruction that a text begins with picks its expert. None: unchanged.
        tasks: Task (possibly new) → expert that serves it. A task without an instruction of its own uses the expert's.
        instructions: Task → text put in front of its inputs.
        instruction_pooling: `included`: instruction tokens are pooled, too. `excluded`: they are read, but left out of
            the pooling. `excluded_by_count`: the same, by NV-Embed's own count of the tokens. None: unchanged.
        end_token: Token that the tokenizer appends to each text, after truncation; `eos`: its end-of-sequence token.
        revision: Branch, tag or commit of a source on the Hub.
        options: How the result is written.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If the source does not exist or has no weights.
        FileExistsError: If `out` is in use.
        OSError: If the result cannot be written; nothing is left behind.
        ValueError: If a task is unknown, an instruction belongs to another expert, or the source is on the Hub and
            there is no `out`.
    """
    changes: dict[str, Any] = {INSTRUCTION + task: text for task, text in (instructions or {}).items()}
    changes |= {EXPERT + task: expert for task, expert in (tasks or {}).items()}
    if default_task is not _UNCHANGED:
        changes["default_task"] = default_task
    if instruction_pooling is not None:
        require_known(instruction_pooling, POOLED, INSTRUCTION_POOLING)
    others = {"route_by_text": route_by_text, INSTRUCTION_POOLING: instruction_pooling, END_TOKEN: end_token}
    changes |= {key: value for key, value in others.items() if value is not None}
    options = options or WriteOptions()
    if out is None:
        options = options.updated(overwrite=True)
    return transform(
        src, out, _set, changes, revision=revision, options=options, after=partial(_write, changes=changes)
    )


def parse_settings(words: Mapping[str, str]) -> dict[str, Any]:
    """Turn the words of `mote set`, as in `{"default_task": "none"}`, into arguments of `configure`.

    Raises:
        ValueError: If a key is unknown; the message lists the known ones.
    """
    settings: dict[str, Any] = {}
    for key, value in words.items():
        kind, dot, task = key.partition(".")
        prefix = kind + dot
        if key == "default_task":
            settings[key] = None if value in ("", "none") else value
        elif key == "route_by_text":
            settings[key] = {"true": True, "false": False}.get(value.lower(), value)
        elif key in KEYS:
            settings[key] = value
        elif task and prefix in PREFIXES:
            text = instruction_with(value) if prefix == DEFINITION else value
            settings.setdefault(PREFIXES[prefix], {})[task] = text
        else:
            require_known(key, [*KEYS, *(f"{each}TASK" for each in PREFIXES)], "setting")
    return settings


def _write(folder: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Write the settings that are not in the config."""
    if INSTRUCTION_POOLING in changes:
        write_instruction_pooling(folder, changes[INSTRUCTION_POOLING])
    if END_TOKEN in changes:
        with_end_token(load_tokenizer(open_mote(str(folder))), changes[END_TOKEN]).save_pretrained(folder)
    return {}


@Verb("set", "made by setting {changes} in", positional=("changes",), same_model=True)
def _set(model: "MoTEModel", changes: Mapping[str, Any]) -> None:
    config = model.config
    fields = {key: changes[key] for key in ("default_task", "route_by_text") if key in changes}
    for prefix, field in ((EXPERT, "tasks"), (INSTRUCTION, "instructions")):
        changed = {key.removeprefix(prefix): value for key, value in changes.items() if key.startswith(prefix)}
        fields[field] = {**getattr(config, field), **changed}
    routing = [key for key in changes if key == "route_by_text" or key.startswith(EXPERT)]
    if routing and not config.routes_by_task:
        raise ValueError(f"{routing[0]} has no effect here: each token of this model finds its experts by a router")
    valid = type(config).from_dict({**config.to_dict(), **fields})
    if fields.get("default_task") is not None:
        valid.expert_of(valid.default_task)  # an error if that expert is not in the folder
    for field in fields:
        setattr(config, field, getattr(valid, field))
