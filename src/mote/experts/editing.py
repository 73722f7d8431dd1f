"""Single experts of a model in memory: add, remove, rename, read.

They also work on a model loaded as remote code, whose classes are not the installed ones. What they refuse leaves the
model unchanged: token-routed, compressed, quantised, offloaded or missing experts, adapters, invalid names.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from mote.checkpoints.transform import Verb
from mote.experts.artefact import ExpertArtefact
from mote.experts.blocks import mean_of_experts, require_editable, set_experts, weights_by_expert
from mote.remote.configuration_mote import GENERAL, MoTEConfig, require_known
from mote.remote.modeling_mote import MoTEModel

MEAN = "mean"  # of all experts, as the start of a new one


@Verb("experts add", "made by adding the expert `{name}` to", positional=("start",))
def add(
    model: MoTEModel,
    name: str,
    start: str | ExpertArtefact | Mapping[str, torch.Tensor] = MEAN,
    *,
    instruction: str | Mapping[str, str] | None = None,
    tasks: str | Iterable[str] = (),
) -> None:
    """Add an expert, and the task of its name. An existing task of that name is reassigned to the new expert.

    The new weights are copies, with the dtype and on the device of the model's other experts. A compiled model must be
    compiled again.

    Args:
        model: A MoTE in memory; changed in place.
        name: Name of the expert.
        start: Its initial weights: those of an expert, the `"mean"` of all experts (unless an expert has that name),
            an extracted expert or a PEFT adapter (from `open_expert`; on the command line its place, or its id on the
            Hub), or the weights themselves, under their names in the dense model, as `weights` returns them.
        instruction: Text in front of its inputs; or task → text, if its tasks differ. Default: the artefact's, also if
            it has none; else the config's for that task, else the paper's, else none, so that only `task=` selects the
            expert.
        tasks: Additional tasks to assign to it, new ones or other experts'. An artefact brings its tasks, except those
            that the model already has, unless `general` serves them.
    """
    require_editable(model, uncompressed=True)
    tasks = [tasks] if isinstance(tasks, str) else list(tasks)
    texts = {name: instruction} if isinstance(instruction, str) else dict(instruction or {})
    if isinstance(start, ExpertArtefact):
        texts, tasks = _names_of_artefact(model.config, start, name, texts, tasks)
    names = with_expert(model.config, name, texts, tasks)
    available = model.config.available_experts
    like = start if isinstance(start, str) and start in available else available[0]
    new_weights = weights_of(model, start)
    copies = _copies(model, like, new_weights)
    for block, expert in zip(model.blocks, copies, strict=True):
        set_experts(block, {**dict(block.experts.items()), name: expert})
    _take_names(model, names)


@Verb("experts remove", "made by removing the expert `{name}` from", positional=("name",))
def remove(model: MoTEModel, name: str, *, tasks: Mapping[str, str | None] | None = None) -> None:
    """Remove an expert, and the task of its name.

    Args:
        model: A MoTE in memory; changed in place.
        name: Name of the expert.
        tasks: New expert of each of its tasks; None, or an empty name, removes the task as well (one that every MoTE
            has, as `query`, then goes to its usual expert). Required for all its tasks but the one of its own name.
    """
    require_editable(model)
    names = _without_expert(model.config, name, tasks or {})
    for block in model.blocks:
        set_experts(block, {key: expert for key, expert in block.experts.items() if key != name})
    _take_names(model, names)


@Verb("experts rename", "made by renaming the expert `{name}` to `{new_name}` in", positional=("name", "new_name"))
def rename(model: MoTEModel, name: str, new_name: str) -> None:
    """Rename an expert, and the task of its name; its other tasks keep their names.

    Args:
        model: A MoTE in memory; changed in place.
        name: Current name.
        new_name: New name.
    """
    require_editable(model)
    names = _with_new_name(model.config, name, new_name)
    for block in model.blocks:
        set_experts(block, {new_name if key == name else key: expert for key, expert in block.experts.items()})
    _take_names(model, names)


def weights(model: MoTEModel, name: str) -> dict[str, torch.Tensor]:
    """Return the weights of one expert under their names in the dense model.

    Args:
        model: A MoTE in memory.
        name: Name of the expert.

    Returns:
        The model's own tensors, detached: `encoder.layer.0.output.dense.weight` → [H, I] and so on.
    """
    require_editable(model, uncompressed=True)
    require_known(name, model.config.available_experts, "expert")
    return weights_by_expert(model.config, model.state_dict())[name]


def weights_of(
    model: MoTEModel, start: str | ExpertArtefact | Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """Return the weights that `start` stands for in `add`, under their names in the dense model."""
    if isinstance(start, ExpertArtefact):
        return start.weights_for(model)
    if not isinstance(start, str):
        return start
    if start == MEAN and MEAN not in model.config.experts:
        return mean_of_experts([weights(model, expert) for expert in model.config.experts])
    return weights(model, start)


def _copies(model: MoTEModel, like: str, new_weights: Mapping[str, torch.Tensor]) -> list[nn.Module]:
    """Copy an expert of each block, with new weights and the block's shared modules."""
    copies = nn.ModuleDict()
    for index, block in zip(model.config.mote_layer_indices, model.blocks, strict=True):
        shared: dict[int, Any] = {id(module): module for module in block.shared.modules()}  # targets of `SharedModule`
        copies[str(index)] = copy.deepcopy(block.experts[like], shared)
    prefix = f"{model.config.architecture.layer_path}."
    copies.load_state_dict({key.removeprefix(prefix): weight for key, weight in new_weights.items()})
    return list(copies.values())


# Names in the config -------------------------------------------------------------------------------------------------


def _take_names(model: MoTEModel, names: MoTEConfig) -> None:
    for field in ("experts", "tasks", "instructions", "default_task", "loaded_experts"):
        setattr(model.config, field, getattr(names, field))


def _names_of_artefact(
    config: MoTEConfig, artefact: ExpertArtefact, name: str, texts: dict[str, str], tasks: list[str]
) -> tuple[dict[str, str], list[str]]:
    """Return the instructions and tasks that an artefact brings into a model, possibly under another name."""
    taken = {task for task, expert in config.tasks.items() if expert != GENERAL or task == GENERAL}
    tasks = [*(task for task in artefact.tasks if task not in (artefact.name, *taken)), *tasks]
    own_texts = {name if task == artefact.name else task: text for task, text in artefact.instructions.items()}
    kept = {task: text for task, text in own_texts.items() if task in (name, *tasks)}
    return {**kept, **texts}, tasks


def with_expert(config: MoTEConfig, name: str, texts: dict[str, str], tasks: list[str]) -> MoTEConfig:
    """Return the config with one more expert, validated."""
    return _replaced(
        config,
        [*config.available_experts, name],
        experts=[*config.experts, name],
        tasks={**config.tasks, **dict.fromkeys([name, *tasks], name)},
        instructions={**config.instructions, **texts},
    )


def _without_expert(config: MoTEConfig, name: str, moved: Mapping[str, str | None]) -> MoTEConfig:
    """Return the config without an expert, validated."""
    require_known(name, config.experts, "expert")
    own = [task for task, expert in config.tasks.items() if expert == name]
    for task in moved:
        require_known(task, own, f"task of the expert {name!r}:")
    missing = [task for task in own if task not in moved and task != name]
    if missing:
        raise ValueError(
            f"The expert {name!r} serves the tasks {', '.join(map(repr, missing))}: name the new expert of each, as in "
            f"`--task {missing[0]}=EXPERT`, or none (`--task {missing[0]}=`) to remove the task as well"
        )
    removed = [task for task in own if not moved.get(task)]
    default = "auto" if config.default_task in removed else config.default_task
    return _replaced(
        config,
        [expert for expert in config.available_experts if expert != name],
        experts=[expert for expert in config.experts if expert != name],
        tasks={task: moved.get(task, expert) for task, expert in config.tasks.items() if task not in removed},
        instructions={task: text for task, text in config.instructions.items() if task not in removed},
        default_task=default,
    )


def _with_new_name(config: MoTEConfig, name: str, new_name: str) -> MoTEConfig:
    """Return the config with an expert renamed, validated."""
    require_known(name, config.experts, "expert")
    if new_name in config.tasks:
        raise ValueError(f"{new_name!r} is already a task, of the expert {config.tasks[new_name]!r}")

    def renamed(names: Iterable[str]) -> list[str]:
        return [new_name if each == name else each for each in names]

    return _replaced(
        config,
        renamed(config.available_experts),
        experts=renamed(config.experts),
        tasks=dict(zip(renamed(config.tasks), renamed(config.tasks.values()), strict=True)),
        instructions=dict(zip(renamed(config.instructions), config.instructions.values(), strict=True)),
        default_task=new_name if config.default_task == name else config.default_task,
    )


def _replaced(config: MoTEConfig, available: list[str], **names: Any) -> MoTEConfig:
    """Return a new config with other names, completed and validated like any new config."""
    loaded = None if available == names["experts"] else available
    return type(config).from_dict({**config.to_dict(), **names, "loaded_experts": loaded})
