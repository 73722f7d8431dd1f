"""Configuration of MoTE: which backbone, which experts, and which task goes to which expert.

This file is copied into every saved model and loaded from there (`trust_remote_code=True`), so it depends on
transformers and torch alone.
"""

import copy
import difflib
import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, ClassVar

from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

# The experts and instructions of the paper (Romero et al., arXiv:2506.17781).
PAPER_INSTRUCTIONS = {
    "classification": "classification: ",
    "clustering": "clustering: ",
    "search_query": "search_query: ",
    "search_document": "search_document: ",
}

# Tasks that no expert is trained on, and the expert that serves each. Reranking has two roles, so it
# needs no name of its own: its texts come as `query` and `document`, the names that Sentence-Transformers gives them.
UNSEEN_TASKS = {
    "query": "search_query",
    "document": "search_document",
    "pair_classification": "classification",
    "sts": "classification",
    "summarization": "classification",
}

# What `encode_query` and `encode_document` say of their texts: weaker than a prompt, see `MoTEConfig.task_of`.
ROLE_HINTS = ("query", "document")

POOLING_MODES = ("mean", "cls", "last_token")

ROUTERS = ("task", "token")

EXPERT_NAME = re.compile(r"[\w-]+")

_ALL_EXPERTS_NEEDED = (
    "With a token router every text needs all experts: load the model without `experts=` and `loaded_experts`"
)


def alternatives(name: str, known: Iterable[str]) -> str:
    """End an error message about an unknown `name`: the nearest known one, then all of them."""
    known = list(known)
    nearest = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return f"{hint} Available: {', '.join(map(repr, known)) or 'none'}."


class MoTEConfig(PreTrainedConfig):
    """Configuration of a [`MoTEModel`].

    Args:
        backbone_config: Config of the dense model whose blocks became experts, or its dict with a `model_type`.
            Default: `NomicBertConfig()`, the paper's backbone.
        experts: Names of the experts, in order. Default: the paper's four.
        tasks: Task name → expert name. Every expert is also a task of its own name, and the tasks that the paper
            never trains on (`query`, `document`, `sts` …) are added where their expert exists.
        instructions: Task → text put in front of its inputs (in the ecosystem: a prompt). A task without one has
            that of its expert's own task. Default: the paper's, as far as the experts go.
        mote_layers: `"every"` block has experts, `"every_other"` (the 2nd, 4th, …), or a list of indices from 0.
        pooling: How `pooler_output` is made of a sequence: `"mean"`, `"cls"` (first token) or `"last_token"`.
        default_task: Task of texts for which none is given. Default: none, which makes that an error.
        loaded_experts: The experts whose weights are present; the others are known by name only. Default: all.
            Set by `from_pretrained(path, experts=[…])`.
        layer_path: Where the backbone keeps its list of layers, as in `"encoder.layer"`. Needed only for
            architectures that are not in the table of `modeling_mote.py`.
        shared_modules: The submodules of each layer that all experts share. Needed together with `layer_path`.
        router: What picks the expert: the `"task"`, one expert for a whole text, or a learned router for each
            `"token"` (see `token_routing_mote.py`), where a task decides on the instruction alone.
        experts_per_token: Of a token router: how many experts each token goes through.
        normalize_router: Of a token router: whether the weights of a token's experts are scaled to sum to 1, so that
            a fresh model gives the dense model's output. With one expert per token that weight is then always 1, and
            the router learns to balance its experts and nothing else. Otherwise the router's probabilities as they are.
        load_balancing: Of a token router: factor of the loss that keeps the experts equally busy in training.
        expert_rank: Of compressed experts (`mote compress`): the rank of their differences from their mean.
        expert_bits: Of compressed experts: 8, for matrices in whole numbers of 8 bits.

    Raises:
        ValueError: If a name, a reference between names, or a layer index does not hold.
    """

    model_type = "mote"
    routes_by_task: ClassVar[bool] = True
    # The base class looks every name up in its `attribute_map`, which has none here. That took longer than routing.
    __getattribute__ = object.__getattribute__
    sub_configs: ClassVar[dict[str, Any]] = {"backbone_config": AutoConfig}

    # None stands for the defaults, until `__post_init__` has filled them in.
    backbone_config: PreTrainedConfig = None  # type: ignore[assignment]
    experts: list[str] = None  # type: ignore[assignment]
    tasks: dict[str, str] = None  # type: ignore[assignment]
    instructions: dict[str, str] = None  # type: ignore[assignment]
    mote_layers: str | list[int] = "every"
    pooling: str = "mean"
    default_task: str | None = None
    loaded_experts: list[str] | None = None
    layer_path: str | None = None
    shared_modules: list[str] | None = None
    router: str = "task"
    experts_per_token: int = 2
    normalize_router: bool = True
    load_balancing: float = 0.01
    expert_rank: int | None = None
    expert_bits: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in the defaults and validate."""
        self.backbone_config = self._as_backbone_config(self.backbone_config)
        if isinstance(self.experts, str):
            raise ValueError(f"experts must be a list of names, not the text {self.experts!r}")  # noqa: TRY004
        self.experts = list(PAPER_INSTRUCTIONS if self.experts is None else self.experts)
        own_names = {expert: expert for expert in self.experts}
        unseen = {task: expert for task, expert in UNSEEN_TASKS.items() if expert in own_names}
        others = {**unseen, **(self.tasks or {})}
        # In an order that outlives JSON, which sorts: `task_ids` are indices into it.
        self.tasks = {**own_names, **{task: others[task] for task in sorted(others, key=str)}}
        if self.instructions is None:
            self.instructions = {task: text for task, text in PAPER_INSTRUCTIONS.items() if task in own_names}
        super().__post_init__(**{name: value for name, value in kwargs.items() if name != "model_type"})
        self.validate()

    @staticmethod
    def _as_backbone_config(backbone_config: PreTrainedConfig | dict | None) -> PreTrainedConfig:
        if isinstance(backbone_config, PreTrainedConfig):
            return copy.deepcopy(backbone_config)  # a composite config writes into its parts
        settings = dict(backbone_config or {"model_type": "nomic_bert"})
        model_type = settings.pop("model_type", None)
        if model_type not in CONFIG_MAPPING:
            raise ValueError(f"backbone_config has an unknown model_type {model_type!r} for this transformers version")
        return CONFIG_MAPPING[model_type](**settings)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build from a dict; `experts=[…]` among the keyword arguments selects the experts to load."""
        selected = kwargs.pop("experts", None)
        result = super().from_dict(config_dict, **kwargs)
        if selected is not None:
            config = result[0] if isinstance(result, tuple) else result
            config.load_only(selected)
        return result

    def load_only(self, experts: str | Iterable[str]) -> None:
        """Choose the experts whose weights a model of this config has, or will load.

        Raises:
            ValueError: If one is not among those present, or a token router needs them all.
        """
        if self.router == "token":
            raise ValueError(_ALL_EXPERTS_NEEDED)
        selected = [experts] if isinstance(experts, str) else list(experts)
        for name in selected:
            if name not in self.available_experts:
                raise ValueError(
                    f"Expert {name!r} is not in this checkpoint." + alternatives(name, self.available_experts)
                )
        self.loaded_experts = [name for name in self.available_experts if name in selected]
        self.validate()

    # What the config says of names -------------------------------------------------------------------------------

    def validate_names(self) -> None:
        """Same as `validate`."""
        self.validate()

    def validate(self) -> None:
        """Check names, references between them, and layer indices; raise `ValueError` at the first that fails."""
        _validate_experts(self.experts, self.loaded_experts)
        for task, expert in self.tasks.items():
            if not isinstance(task, str) or not task:
                raise ValueError(f"A task's name must be a text that is not empty, not {task!r}")
            if expert not in self.experts:
                raise ValueError(f"Task {task!r} names the expert {expert!r}." + alternatives(expert, self.experts))
        for expert in self.experts:
            if self.tasks[expert] != expert:
                raise ValueError(f"Task {expert!r} must go to the expert of its own name, not {self.tasks[expert]!r}")
        if self.default_task is not None and self.default_task not in self.tasks:
            raise ValueError(
                f"default_task {self.default_task!r} is not a task." + alternatives(self.default_task, self.tasks)
            )
        if self.pooling not in POOLING_MODES:
            raise ValueError(f"Unknown pooling {self.pooling!r}." + alternatives(self.pooling, POOLING_MODES))
        if (self.layer_path is None) != (self.shared_modules is None):
            raise ValueError("layer_path and shared_modules describe one architecture: set both or neither")
        self._validate_router()
        if self.model_type == "mote":
            self._validate_compression()
        self._validate_instructions()
        _ = self.mote_layer_indices

    def _validate_router(self) -> None:
        if self.router not in ROUTERS:
            raise ValueError(f"Unknown router {self.router!r}." + alternatives(self.router, ROUTERS))
        if self.router == "task":
            return
        if self.loaded_experts is not None:
            raise ValueError(_ALL_EXPERTS_NEEDED)
        if self.layer_path is not None:
            raise ValueError(
                "layer_path and shared_modules say what task experts share; they cannot describe an architecture to a "
                "token router"
            )
        count = self.experts_per_token
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= len(self.experts):
            raise ValueError(
                f"experts_per_token must be a whole number from 1 to {len(self.experts)}, the number of experts, not "
                f"{count!r}"
            )
        if not isinstance(self.normalize_router, bool):
            raise ValueError(f"normalize_router must be True or False, not {self.normalize_router!r}")  # noqa: TRY004
        factor = self.load_balancing
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            raise ValueError(f"load_balancing must be a number, 0 or more, not {factor!r}")

    def _validate_compression(self) -> None:
        if self.compression is None:
            return
        self.require_experts_of_tasks("compressed")
        if self.expert_rank is not None and self.expert_bits is not None:
            raise ValueError("Experts are compressed by expert_rank or by expert_bits, not by both: leave one out")
        if self.expert_bits not in (None, 8):
            raise ValueError(f"expert_bits must be 8, not {self.expert_bits!r}")
        rank = self.expert_rank
        if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool) or rank < 1):
            raise ValueError(
                f"expert_rank must be a whole number from 1 to the full rank of the experts' matrices, not {rank!r}"
            )

    def _validate_instructions(self) -> None:
        """Where a prompt's text decides the expert, one text must not stand for two experts."""
        for task, text in self.instructions.items():
            if task not in self.tasks:
                raise ValueError(f"Instruction for an unknown task {task!r}." + alternatives(task, self.tasks))
            if not isinstance(text, str):
                raise ValueError(f"The instruction of task {task!r} must be a text, not {text!r}")  # noqa: TRY004
        if self.router == "token" or not self.routes_by_task:
            return
        expert_of_text: dict[str, str] = {}
        for task, expert in self.tasks.items():
            text = self.instruction_of(task)
            if text and expert_of_text.setdefault(text, expert) != expert:
                raise ValueError(
                    f"The instruction {text!r} of task {task!r} already stands for the expert "
                    f"{expert_of_text[text]!r}: give the tasks of different experts different instructions"
                )

    @property
    def available_experts(self) -> list[str]:
        """The experts whose weights are present, in the order of `experts`."""
        return self.experts if self.loaded_experts is None else self.loaded_experts

    def require_expert(self, name: str) -> str:
        """Return the name of an expert whose weights are present.

        Raises:
            ValueError: If there is no such expert, or it was not loaded.
        """
        if name not in self.experts:
            raise ValueError(f"Unknown expert {name!r}." + alternatives(name, self.experts))
        if name not in self.available_experts:
            raise ValueError(
                f"The expert {name!r} was not loaded (loaded: {', '.join(map(repr, self.available_experts))}). Load "
                "the model without `experts=`, or with it in the list."
            )
        return name

    def require_experts_of_tasks(self, done: str) -> None:
        """Raise `ValueError` where a router picks experts token by token; `done` says what cannot be done to them."""
        if self.router == "token":
            raise ValueError(f"The experts of a token router are not experts for tasks: they are not {done}")

    def require_whole_experts(self, done: str) -> None:
        """Raise `ValueError` where the experts are compressed; `done` says what cannot be done to them."""
        if self.compression is not None:
            raise ValueError(
                f"The experts of this model are compressed ({self.compression}): they are not {done}. Do it with the "
                "model that it was made of, before `mote compress`"
            )

    @property
    def compression(self) -> str | None:
        """How the experts are compressed, in words; None where they are not."""
        if self.expert_rank is None and self.expert_bits is None:
            return None
        if self.expert_rank is None:
            return "8-bit integers"
        return f"differences of rank {self.expert_rank} from their mean"

    @property
    def mote_layer_indices(self) -> list[int]:
        """Indices, from 0, of the blocks that have experts."""
        count = getattr(self.backbone_config, "num_hidden_layers", None)
        if count is None:
            raise ValueError(
                f"MoTE does not know the architecture {self.backbone_config.model_type!r}: it has no single list of "
                "layers (num_hidden_layers)"
            )
        if self.mote_layers == "every":
            return list(range(count))
        if self.mote_layers == "every_other" and count > 1:
            return list(range(1, count, 2))
        indices = self.mote_layers
        if not isinstance(indices, list | tuple) or not all(isinstance(index, int) for index in indices):
            raise ValueError(
                "mote_layers must be 'every', 'every_other' (of two layers or more) or a list of indices, not "
                f"{indices!r}"
            )
        wrong = sorted({index for index in indices if not 0 <= index < count or indices.count(index) > 1})
        if wrong or not indices:
            raise ValueError(
                f"mote_layers {indices!r} must hold at least one index, each once, from 0 to {count - 1}: "
                f"the backbone has {count} layers" + (f"; wrong: {wrong}" if wrong else "")
            )
        return sorted(indices)

    # Tasks → experts ---------------------------------------------------------------------------------------------

    def expert_of(self, task: str) -> str:
        """Name the expert that serves `task`.

        Raises:
            ValueError: If the task is unknown, or its expert was not loaded.
        """
        expert = self.tasks.get(task) if isinstance(task, str) else None
        if expert is None:
            raise ValueError(f"Unknown task {task!r}." + alternatives(task, self.tasks))
        if expert not in self.available_experts:
            raise ValueError(
                f"Task {task!r} needs the expert {expert!r}, which was not loaded (loaded: "
                f"{', '.join(map(repr, self.available_experts))}). Load the model without `experts=`, or with it in "
                "the list."
            )
        return expert

    def instruction_of(self, task: str) -> str:
        """Return the text that goes in front of the inputs of `task`, possibly empty."""
        return self.instructions.get(task, self.instructions.get(self.tasks[task], ""))

    def task_of(self, texts: Sequence[Any], task: str | None = None, prompt: str | None = None) -> str | list[str]:
        """Decide which task some texts are for. The only place that does; the first rule that applies wins.

        1. An explicit `task`, unless it is only a role hint.
        2. The `prompt`, when its text is an instruction of the config.
        3. The role hints `query` and `document`.
        4. The instruction that a text itself begins with, text by text.
        5. The config's `default_task`.

        Args:
            texts: The inputs, before the prompt is put in front of them.
            task: A task's name, or a role hint.
            prompt: The text that will be put in front of each input.

        Returns:
            The task, if it is one for all texts, otherwise one task per text.

        Raises:
            ValueError: If the task is unknown, or no rule applies: there is never a silent default.
        """
        if task is not None and not isinstance(task, str):
            raise ValueError(
                f"`task` must be one name for all texts, not {task!r}: encode() sorts texts by length, so a list "
                "would go astray. Call it once per task, or put each text's instruction in front of it."
            )
        if task is not None and task not in ROLE_HINTS:
            self.expert_of(task)
            return task
        task_of_instruction = self._tasks_by_instruction
        if prompt in task_of_instruction:
            return task_of_instruction[prompt]
        if task in self.tasks:
            return task
        return self._tasks_from_prefixes([(prompt or "") + text if isinstance(text, str) else "" for text in texts])

    @property
    def _tasks_by_instruction(self) -> dict[str, str]:
        """Instruction → the first task that has it; empty instructions say nothing."""
        by_text: dict[str, str] = {}
        for task in self.tasks:
            by_text.setdefault(self.instruction_of(task), task)
        by_text.pop("", None)
        return by_text

    def _tasks_from_prefixes(self, texts: Sequence[str]) -> str | list[str]:
        instructions = sorted(self._tasks_by_instruction.items(), key=lambda item: -len(item[0]))
        tasks = []
        for text in texts:
            task = next((task for instruction, task in instructions if text.startswith(instruction)), self.default_task)
            if task is None:
                raise ValueError(
                    f"No task for the text {text[:60]!r}: it begins with no known instruction, and the model has no "
                    "default_task. Pass `task=`, or the `prompt_name=` of a task that has an instruction, one of: "
                    f"{', '.join(map(repr, self.tasks))}."
                )
            tasks.append(task)
        return tasks[0] if len(set(tasks)) == 1 else tasks

    # What readers of a config expect of any text encoder ---------------------------------------------------------

    @property
    def hidden_size(self) -> int:
        """Width of the embeddings."""
        return self.backbone_config.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        """Number of blocks, with and without experts."""
        return self.backbone_config.num_hidden_layers

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence, in tokens, where the backbone has such a limit."""
        return self.backbone_config.max_position_embeddings

    @property
    def vocab_size(self) -> int:
        """Number of token embeddings."""
        return self.backbone_config.vocab_size


def _validate_experts(experts: list[str], loaded: Collection[str] | None) -> None:
    if not experts:
        raise ValueError("experts must name at least one expert")
    for name in experts:
        if not isinstance(name, str) or not EXPERT_NAME.fullmatch(name):
            raise ValueError(
                f"Expert name {name!r} must be one word of letters, digits, '_' and '-': it is part of the keys of the "
                "weights"
            )
        if hasattr(nn.ModuleDict(), name):
            raise ValueError(f"Expert name {name!r} is taken by torch's ModuleDict: choose another")
    repeated = sorted({name for name in experts if experts.count(name) > 1})
    if repeated:
        raise ValueError(f"Expert names must differ; repeated: {', '.join(map(repr, repeated))}")
    unknown = sorted(set(loaded or ()) - set(experts))
    if unknown or (loaded is not None and not loaded):
        raise ValueError(f"loaded_experts {list(loaded or ())!r} must be some of the experts {experts!r}")


MoTEConfig.register_for_auto_class()
