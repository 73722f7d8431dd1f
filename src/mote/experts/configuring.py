"""Settings of a MoTE on disk that decide which expert a text goes to, and which instruction is put in front of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mote.checkpoints.models import load_tokenizer
from mote.checkpoints.options import WriteOptions
from mote.checkpoints.reading import open_mote
from mote.checkpoints.st_settings import INSTRUCTION_POOLING, POOLED, write_instruction_pooling
from mote.checkpoints.tokens import with_end_token
from mote.checkpoints.transform import Verb, transform
from mote.remote.configuration_mote import require_known
from mote.remote.modeling_mote import MoTEModel

NO_DEFAULT = "none"


def configure(
    src: str | Path,
    out: str | Path | None = None,
    *,
    default_task: str | None = None,
    route_by_text: bool | None = None,
    tasks: Mapping[str, str] | None = None,
    instructions: Mapping[str, str] | None = None,
    instruction_pooling: Literal["included", "excluded", "excluded_by_count"] | None = None,
    end_token: str | None = None,
    revision: str | None = None,
    options: WriteOptions | None = None,
) -> Path:
    """Set default task, tasks of experts, instructions and routing of a MoTE on disk.

    Prompts, card and `mote.json` are updated; weights, and settings that are not given, stay unchanged.

    Args:
        src: A MoTE: a folder or an id on the Hub.
        out: Output folder. Default: SRC itself, which stays as it is if anything fails.
        default_task: Task of texts for which none is given, without its instruction; `none`: such texts are an error.
        route_by_text: Whether an instruction that a text begins with picks its expert.
        tasks: Task (possibly new) → expert that serves it. A task without an instruction of its own uses the expert's.
        instructions: Task → text put in front of its inputs; `mote.instruction_with` makes one from a definition.
        instruction_pooling: `included`: instruction tokens are pooled, too. `excluded`: they are read, but left out of
            the pooling. `excluded_by_count`: the same, by NV-Embed's own count of the tokens.
        end_token: Token that the tokenizer appends to each text, after truncation; `eos`: its end-of-sequence token.
        revision: Branch, tag or commit of a source on the Hub.
        options: How the result is written.

    Returns:
        The folder.
    """
    if instruction_pooling is not None:
        require_known(instruction_pooling, POOLED, INSTRUCTION_POOLING)
    changes = {
        "default_task": default_task,
        "route_by_text": route_by_text,
        "tasks": tasks,
        "instructions": instructions,
    }
    of_files = {"instruction_pooling": instruction_pooling, "end_token": end_token}

    def write_others(folder: Path) -> dict[str, Any]:
        if instruction_pooling is not None:
            write_instruction_pooling(folder, instruction_pooling)
        if end_token is not None:
            with_end_token(load_tokenizer(open_mote(str(folder))), end_token).save_pretrained(folder)
        return {}

    options = options or WriteOptions()
    return transform(
        src,
        out,
        _set,
        **{name: value for name, value in changes.items() if value is not None},
        revision=revision,
        options=options.updated(overwrite=True) if out is None else options,
        after=write_others,
        recorded={name: value for name, value in of_files.items() if value is not None},
    )


@Verb("set", "made by changing settings of", same_model=True)
def _set(model: MoTEModel, **changes: Any) -> None:
    config = model.config
    if not config.routes_by_task and (unused := changes.keys() & {"tasks", "route_by_text"}):
        raise ValueError(f"{min(unused)} has no effect here: each token of this model finds its experts by a router")
    for name in changes.keys() & {"tasks", "instructions"}:
        changes[name] = {**getattr(config, name), **changes[name]}
    if changes.get("default_task") == NO_DEFAULT:
        changes["default_task"] = None
    valid = type(config).from_dict({**config.to_dict(), **changes})
    if changes.get("default_task") is not None:
        valid.expert_of(valid.default_task)  # an error if that expert is not in the folder
    for name in ("tasks", "instructions", "default_task", "route_by_text"):
        setattr(config, name, getattr(valid, name))
