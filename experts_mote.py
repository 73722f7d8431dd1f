"""What can be done with single experts of a model in memory: add, remove, rename, take one out as a dense model.

This file is copied into every saved model and loaded from there (`trust_remote_code=True`), so it depends on torch and
transformers alone.
"""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel

try:
    from .architectures_mote import attend_both_ways  # type: ignore[import-not-found]
    from .configuration_mote import PAPER_INSTRUCTIONS, MoTEConfig, alternatives  # type: ignore[import-not-found]
except ImportError:  # imported as an installed top-level module rather than as remote code
    from architectures_mote import attend_both_ways
    from configuration_mote import PAPER_INSTRUCTIONS, MoTEConfig, alternatives

MEAN = "mean"  # of all experts, as what a new one starts from

# What a config says of experts, and what changes with them.
_NAMES = ("experts", "tasks", "instructions", "default_task", "loaded_experts")


class SingleExperts:
    """The methods of a [`MoTEModel`] for single experts."""

    config: MoTEConfig
    blocks: Any
    architecture: Any
    every_expert: Any
    require_experts_in_memory: Any
    _keys_to_ignore_on_load_unexpected: Any

    def add_expert(
        self,
        name: str,
        start: str | Mapping[str, torch.Tensor] = MEAN,
        *,
        instruction: str | Mapping[str, str] | None = None,
        tasks: str | Iterable[str] = (),
    ) -> None:
        """Add an expert, and the task of its name. If a task has that name already, it goes to the new expert.

        The new weights are copies, of the type and on the device of those they are made from.

        Args:
            name: Of the expert.
            start: Its weights: those of an expert, the `"mean"` of all experts (unless an expert has that name), or
                the weights themselves, named and shaped as `expert_weights` gives them.
            instruction: Text in front of its texts; or task → text, where its tasks differ. Default: what the config
                says of that task, else the paper's, else none, and then only `task=` picks the expert.
            tasks: Further tasks that go to it from now on, whether they are new or went to another expert.

        Raises:
            ValueError: If the name is taken or no name, the start is unknown or does not fit, a task is the own one
                of another expert, an instruction stands for another expert, or the experts are routed token by
                token, compressed, or not in memory. The model is then as it was.
        """
        self._require_changeable("added")
        self.config.require_whole_experts("added")
        names = _with_expert(self.config, name, instruction, [tasks] if isinstance(tasks, str) else list(tasks))
        like = start if isinstance(start, str) and start in self.config.available_experts else None
        weights = self._start(start)
        copies = self._copies(like or self.config.available_experts[0], weights)
        for block, expert in zip(self.blocks, copies, strict=True):
            block.experts[name] = expert
        self._take(names)

    def remove_expert(self, name: str, *, tasks: Mapping[str, str | None] | None = None) -> None:
        """Remove an expert, and the task of its name.

        Args:
            name: Of the expert.
            tasks: Where its tasks go from now on: task → expert, or None for a task that is to be removed as well.
                All but the one of the expert's own name must be given.

        Raises:
            ValueError: If there is no such expert, it is the last one, a task of its is not given, the default task
                would be gone, or the experts are routed token by token or not in memory. The model is then as it was.
        """
        self._require_changeable("removed")
        names = _without_expert(self.config, name, tasks or {})
        if name in self.config.available_experts:
            for block in self.blocks:
                del block.experts[name]
        self._take(names)

    def rename_expert(self, name: str, new_name: str) -> None:
        """Rename an expert, and the task of its name; its other tasks keep theirs.

        Args:
            name: As it is called.
            new_name: As it is to be called.

        Raises:
            ValueError: If there is no such expert, the new name is taken or no name, or the experts are routed token
                by token or not in memory. The model is then as it was.
        """
        self._require_changeable("renamed")
        names = _with_another_name(self.config, name, new_name)
        for block in self.blocks:
            experts = [(new_name if key == name else key, expert) for key, expert in block.experts.items()]
            block.experts.clear()  # and filled again: their order is that of the config
            block.experts.update(experts)
        self._take(names)

    def expert_weights(self, name: str) -> dict[str, torch.Tensor]:
        """Return the weights of one expert under the names that they have in the dense model.

        Args:
            name: Of the expert.

        Returns:
            The model's own tensors, without gradients: `encoder.layer.0.output.dense.weight` → [H, I] and so on.

        Raises:
            ValueError: If there is no such expert, it is not loaded, or experts are routed token by token, compressed,
                or not in memory.
        """
        self._require_changeable("taken out")
        self.config.require_whole_experts("taken out")
        self.config.require_expert(name)
        key = weight_of_an_expert(self)
        found = [(key.fullmatch(path), weight) for path, weight in self.state_dict().items()]  # type: ignore[attr-defined]
        return {
            match["layer"] + match["weight"]: weight
            for match, weight in found
            if match is not None and match["expert"] == name
        }

    def _require_changeable(self, done: str) -> None:
        """Raise `ValueError` where single experts cannot be worked on; `done` says what cannot be done to them."""
        self.config.require_experts_of_tasks(done)
        self.require_experts_in_memory(done)
        if any(weight.is_meta for block in self.blocks for weight in block.experts.parameters()):
            raise ValueError(
                "The weights of some experts are not in memory, they are on the device `meta`: experts are not "
                f"{done}. Load the model with its weights"
            )

    def _start(self, start: str | Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Find the weights that a new expert starts with."""
        experts = self.config.available_experts
        if not isinstance(start, str):
            like = {key: tuple(weight.shape) for key, weight in self.expert_weights(experts[0]).items()}
            given = {key: tuple(weight.shape) for key, weight in start.items()}
            wrong = sorted(key for key in like.keys() | given.keys() if like.get(key) != given.get(key))
            if wrong:
                raise ValueError(
                    f"The weights do not fit: {len(wrong)} are missing, unknown or of another shape, as {wrong[0]!r} "
                    f"({given.get(wrong[0], 'missing')}, expected {like.get(wrong[0], 'none')})"
                )
            return start
        if start == MEAN and MEAN not in self.config.experts:
            require_all_experts(self.config)
            return mean_of_experts([self.expert_weights(expert) for expert in experts])
        if start not in self.config.experts:
            raise ValueError(f"Unknown start {start!r}." + alternatives(start, [*experts, MEAN]))
        return self.expert_weights(start)

    def _copies(self, like: str, weights: Mapping[str, torch.Tensor]) -> list[nn.Module]:
        """Copy an expert of each block, with other weights, but with the block's shared modules."""
        copies = []
        for index, block in zip(self.config.mote_layer_indices, self.blocks, strict=True):
            shared = {id(module): module for module in block.shared.modules()}  # what a `SharedModule` points to
            expert = copy.deepcopy(block.experts[like], shared)
            prefix = f"{self.architecture.layer_path}.{index}."
            expert.load_state_dict(
                {key.removeprefix(prefix): weight for key, weight in weights.items() if key.startswith(prefix)}
            )
            copies.append(expert)
        return copies

    def _take(self, names: MoTEConfig) -> None:
        """Take over what another config says of experts."""
        for field in _NAMES:
            setattr(self.config, field, getattr(names, field))
        self._ignore_absent_experts()

    def _ignore_absent_experts(self) -> None:
        """Have `from_pretrained` skip the weights of experts that are known by name only."""
        begin = r"\.experts\.("
        known = {key for key in self._keys_to_ignore_on_load_unexpected or () if not key.startswith(begin)}
        absent = [re.escape(name) for name in self.config.experts if name not in self.config.available_experts]
        ignored = known | ({begin + "|".join(absent) + r")\."} if absent else set())
        self._keys_to_ignore_on_load_unexpected = ignored or None

    def export_expert(self, name: str) -> PreTrainedModel:
        """Make one expert a dense model of the backbone's own architecture, which needs no code of MoTE.

        Args:
            name: Of the expert.

        Returns:
            The native model, without a pooler: its `last_hidden_state` equals that of the MoTE for this expert, bit
            for bit. Its weights are copies, so that both can be used and trained on. Those of a compressed expert are
            multiplied out.

        Raises:
            ValueError: If there is no such expert, it is not loaded, or a router picks experts token by token.
        """
        self.config.require_experts_of_tasks("exported")
        try:
            from .compression_mote import decompressed_weights as whole_weights  # type: ignore[import-not-found]
        except ImportError:
            from compression_mote import decompressed_weights as whole_weights
        expert = self.config.require_expert(name)
        key = weight_of_an_expert(self)
        weights: dict[str, torch.Tensor] = {}
        with self.every_expert():
            for path, weight in whole_weights(self, expert).items():
                found = key.fullmatch(path)
                if found is None:
                    weights[path.removeprefix("backbone.")] = weight.clone()
                elif found["expert"] in (None, expert):  # an expert's own come after the mean of compressed ones
                    weights[found["layer"] + found["weight"]] = weight.clone()
        return native_model(self, weights)


def mean_of(weights: Sequence[torch.Tensor], shares: Sequence[float] | None = None) -> torch.Tensor:
    """Take a mean in float64, in which that of equal float32 weights is these weights again.

    Args:
        weights: Tensors of one shape.
        shares: Of each in the mean, scaled to sum to 1. Default: equal ones.

    Returns:
        The mean, in float64 on the CPU.
    """
    stacked = torch.stack([weight.to("cpu", torch.float64) for weight in weights])
    if shares is None or len(set(shares)) == 1:
        return stacked.mean(dim=0)
    return torch.tensordot(torch.tensor(shares, dtype=torch.float64) / sum(shares), stacked, dims=1)


def mean_of_experts(
    experts: Sequence[Mapping[str, torch.Tensor]], shares: Sequence[float] | None = None
) -> dict[str, torch.Tensor]:
    """Take the mean of several experts' weights, in the type of the first; see `mean_of`."""
    return {key: mean_of([expert[key] for expert in experts], shares).to(first) for key, first in experts[0].items()}


def require_all_experts(config: MoTEConfig) -> None:
    """Raise `ValueError` where some experts are not loaded, so that there is no mean of all."""
    absent = [name for name in config.experts if name not in config.available_experts]
    if absent:
        raise ValueError(
            f"The experts {', '.join(map(repr, absent))} are not loaded (loaded: "
            f"{', '.join(map(repr, config.available_experts))}): their mean takes all of them"
        )


def _with_expert(
    config: MoTEConfig, name: str, instruction: str | Mapping[str, str] | None, tasks: list[str]
) -> MoTEConfig:
    """Return the config with one expert more, checked."""
    if name in config.experts:
        raise ValueError(
            f"There is an expert {name!r} already (experts: {', '.join(map(repr, config.experts))}): choose another "
            "name, or rename or remove that one first"
        )
    if instruction is None:
        instruction = {}
    texts = instruction if isinstance(instruction, Mapping) else {name: instruction}
    others = [task for task in texts if task not in (name, *tasks)]
    if others:
        raise ValueError(f"An instruction is given for {others[0]!r}." + alternatives(others[0], [name, *tasks]))
    loaded = config.loaded_experts
    return _renamed(
        config,
        experts=[*config.experts, name],
        tasks={**config.tasks, **dict.fromkeys([name, *tasks], name)},
        instructions={**_paper_instruction(name), **config.instructions, **texts},
        loaded_experts=None if loaded is None else [*loaded, name],
    )


def _paper_instruction(name: str) -> dict[str, str]:
    return {name: PAPER_INSTRUCTIONS[name]} if name in PAPER_INSTRUCTIONS else {}


def _without_expert(config: MoTEConfig, name: str, moved: Mapping[str, str | None]) -> MoTEConfig:
    """Return the config with one expert less, checked."""
    if name not in config.experts:
        raise ValueError(f"Unknown expert {name!r}." + alternatives(name, config.experts))
    if config.available_experts == [name]:
        raise ValueError(f"{name!r} is the last expert: a MoTE has at least one. Add another one first")
    own = [task for task, expert in config.tasks.items() if expert == name]
    unknown = [task for task in moved if task not in own]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no task of the expert {name!r}." + alternatives(unknown[0], own))
    unsaid = [task for task in own if task not in moved and task != name]
    if unsaid:
        other = next(expert for expert in config.experts if expert != name)
        raise ValueError(
            f"The tasks {', '.join(map(repr, unsaid))} go to the expert {name!r}: say for each where it goes from now "
            f"on, as in tasks={{{unsaid[0]!r}: {other!r}}} (`--task {unsaid[0]}={other}`), or None (`--task "
            f"{unsaid[0]}=`) for one that is to be removed with it"
        )
    gone = [task for task in own if moved.get(task) is None]
    if config.default_task in gone:
        raise ValueError(
            f"{config.default_task!r} is the default_task of the config: send it to another expert by `tasks`, or set "
            "config.default_task to another task or None first"
        )
    experts = [expert for expert in config.experts if expert != name]
    loaded = None if config.loaded_experts is None else [other for other in config.loaded_experts if other != name]
    return _renamed(
        config,
        experts=experts,
        tasks={task: moved.get(task, expert) for task, expert in config.tasks.items() if task not in gone},
        instructions={task: text for task, text in config.instructions.items() if task not in gone},
        loaded_experts=None if loaded == experts else loaded,
    )


def _with_another_name(config: MoTEConfig, name: str, new_name: str) -> MoTEConfig:
    """Return the config with an expert under another name, checked."""
    if name not in config.experts:
        raise ValueError(f"Unknown expert {name!r}." + alternatives(name, config.experts))
    if new_name in config.tasks:
        raise ValueError(
            f"{new_name!r} is a task already, of the expert {config.tasks[new_name]!r}: choose another name (tasks: "
            f"{', '.join(map(repr, config.tasks))})"
        )

    def renamed(names: Iterable[str]) -> list[str]:
        return [new_name if each == name else each for each in names]

    return _renamed(
        config,
        experts=renamed(config.experts),
        tasks=dict(zip(renamed(config.tasks), renamed(config.tasks.values()), strict=True)),
        instructions=dict(zip(renamed(config.instructions), config.instructions.values(), strict=True)),
        default_task=new_name if config.default_task == name else config.default_task,
        loaded_experts=None if config.loaded_experts is None else renamed(config.loaded_experts),
    )


def _renamed(config: MoTEConfig, **names: Any) -> MoTEConfig:
    """Return a config that says other things of its experts, filled in and checked as any new one is."""
    return type(config).from_dict({**config.to_dict(), **names})


def weight_of_an_expert(model: Any) -> re.Pattern[str]:
    """Describe the keys of blocks with experts: `layer`, `expert` (none in what is shared) and `weight`."""
    layers = re.escape(model.architecture.layer_path)
    indices = "|".join(map(str, model.config.mote_layer_indices))
    return re.compile(
        rf"backbone\.(?P<layer>{layers}\.(?:{indices})\.)(?:shared|experts\.(?P<expert>[^.]+))\.(?P<weight>.+)"
    )


def native_model(model: Any, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Build the native model of a MoTE's backbone around some weights, all of which must fit."""
    config = copy.deepcopy(model.config.backbone_config)
    attention = model.backbone.config._attn_implementation
    dense: PreTrainedModel = AutoModel.from_config(config, attn_implementation=attention)
    if getattr(dense, "pooler", None) is not None:
        dense.pooler = None  # type: ignore[assignment]  # a MoTE has none
    attend_both_ways(dense)
    dense.load_state_dict(weights, assign=True)
    return dense.to(model.device).train(model.training)
