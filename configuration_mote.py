"""Configuration of MoTE: the backbone, its experts, and which expert serves which task.

This file is copied into every saved model and loaded from there (`trust_remote_code=True`), so it depends on
transformers and torch alone.
"""

import copy
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from transformers.utils import logging
from transformers.utils.versions import require_version

INSTALL = 'A MoTE needs: pip install -U "transformers>=5.17" "sentence-transformers>=6.0", or `mote export` an expert'
require_version("transformers>=5.17", INSTALL)

from transformers import AutoConfig, PreTrainedConfig  # noqa: E402

if TYPE_CHECKING:  # never run: transformers reads it, to tell apart copies of this file beside different code
    from .modeling_mote import MoTEModel  # noqa: F401

logger: Any = logging.get_logger(__name__)

# The experts and instructions of the paper (Romero Calvo et al., arXiv:2506.17781).
PAPER_INSTRUCTIONS = {
    expert: f"{expert}: " for expert in ("classification", "clustering", "search_query", "search_document")
}

# Tasks that no expert is trained on → the task whose expert serves each, if the model has that task. `query` and
# `document` are Sentence-Transformers' names for the two sides of search and reranking.
UNSEEN_TASKS = {
    "query": "search_query",
    "document": "search_document",
    **dict.fromkeys(("pair_classification", "sts", "summarization"), "classification"),
}

# What `encode_query` and `encode_document` pass as the task: weaker than a prompt, see `MoTEConfig.task_of`.
ROLE_HINTS = ("query", "document")

# MTEB looks for a prompt under the task's type (with the role, for asymmetric tasks), or under the role alone. These
# are its names of the seven task types; the roles `query` and `document` already are tasks of ours.
MTEB_PROMPTS = {
    "Classification": "classification",
    "MultilabelClassification": "classification",
    "Clustering": "clustering",
    "PairClassification": "pair_classification",
    "STS": "sts",
    "Summarization": "summarization",
    "Retrieval-query": "query",
    "Retrieval-document": "document",
    "Reranking-query": "query",
    "Reranking-document": "document",
}

GENERAL = "general"  # the expert that is the dense source, and handles what no other expert does
EXPERT_NAME = re.compile(r"[\w-]+")

# Settings of the backbone that readers of `config.json` expect of any text encoder.
SIZES = ("hidden_size", "num_hidden_layers", "max_position_embeddings", "vocab_size")


class Architecture(NamedTuple):
    """What differs between model families: a row of `ARCHITECTURES`."""

    layer_path: str  # of the list of layers in the model
    shared_modules: tuple[str, ...]  # paths, in a layer, of the modules that all experts share: attention and its norms


_BERT = Architecture("encoder.layer", ("attention.self", "attention.output.dense"))
_PRE_NORM = Architecture("layers", ("self_attn", "input_layernorm"))
_SANDWICH_NORM = Architecture("layers", ("self_attn", "input_layernorm", "post_attention_layernorm"))

ARCHITECTURES = {
    **dict.fromkeys(["nomic_bert", "jina_embeddings_v3", "gte"], Architecture("layers", ("self_attn",))),
    **dict.fromkeys(["bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie"], _BERT),
    "mpnet": Architecture("encoder.layer", ("attention.attn",)),
    "distilbert": Architecture("transformer.layer", ("attention",)),
    "modernbert": Architecture("layers", ("attn", "attn_norm")),
    **dict.fromkeys(["eurobert", "mistral", "qwen2", "qwen3", "llama"], _PRE_NORM),
    **dict.fromkeys(["gemma2", "gemma3_text"], _SANDWICH_NORM),
}

REFUSED_ARCHITECTURES = {
    "albert": "it uses one layer again and again, so its blocks cannot have experts of their own",
    "deberta": "it does not pass keyword arguments down to its layers, so they cannot be told the expert",
    "deberta-v2": "it does not pass keyword arguments down to its layers, so they cannot be told the expert",
}


def alternatives(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown `name`: the nearest known name, then all known names."""
    known = list(known)
    nearest = [f" Did you mean {match!r}?" for match in difflib.get_close_matches(str(name), known, n=1)]
    return f"{''.join(nearest)} Available: {', '.join(map(repr, known)) or 'none'}."


def require_known(name: object, known: Iterable[str], what: str) -> None:
    """Raise `ValueError` for a name that is not among the known ones; the message has the nearest one."""
    known = list(known)
    if name not in known:
        raise ValueError(f"Unknown {what} {name!r}." + alternatives(str(name), known))


def as_imported() -> None:
    """Make the files attributes of their package, as an import would, since dill looks up classes there."""
    for name, module in [*sys.modules.items()]:
        package, _, file = name.rpartition(".")
        if package == __package__:
            setattr(sys.modules[package], file, module)


def of_backbone(name: str, doc: str) -> property:
    """Make a property that reads and writes a setting of the backbone's config."""
    get = attrgetter(f"backbone_config.{name}")
    return property(get, lambda config, value: setattr(config.backbone_config, name, value), doc=doc)


def _refuse_misspelled(names: Iterable[str], config_class: type["MoTEConfig"]) -> None:
    ours = config_class.__mro__[: config_class.__mro__.index(MoTEConfig) + 1]
    known = [name for one in ours for name in one.__annotations__]
    for name in sorted({*names}.difference(known)):
        if near := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
            raise ValueError(f"Unknown setting {name!r}. Did you mean {near[0]!r}?")


class MoTEConfig(PreTrainedConfig):
    """Configuration of a [`MoTEModel`].

    Args:
        backbone_config: Config of the dense model whose blocks became experts, or its dict with a `model_type`.
            Default: the paper's backbone, `NomicBertConfig()`.
        experts: Names of the experts, in order. Default: the paper's four.
        tasks: Task name → expert name. Every expert is also a task of its own name, and the tasks that the paper
            never trains on (`query`, `document`, `sts` …) are added if their expert exists.
        instructions: Task → text put in front of its inputs (Sentence-Transformers' prompt). A task without one uses
            that of its expert's own task. Default: the paper's instructions, for the paper's experts.
        mote_layers: Blocks with experts: `"every"`, `"every_other"` (the 2nd, 4th, …), or a list of indices from 0.
        pooling: How `pooler_output` is computed: `"mean"`, `"cls"` (first token) or `"last_token"`.
        default_task: Task of texts for which no other rule of `task_of` decides. `"auto"`: that of the expert
            `general`, else of the one that serves documents, else of the first. `"none"` or None: an error.
        route_by_text: Whether an instruction that a text begins with, also one of the paper's, picks its expert. Set
            False for untrusted texts: then only prompts, `task=` and the default task pick it.
        loaded_experts: The experts whose weights are present; the others are known by name only. Default: all.
            Set by `from_pretrained(path, experts=[…])`.
        layer_path: Path of the backbone's list of layers, as in `"encoder.layer"`. Only needed for architectures that
            are not in `ARCHITECTURES`.
        shared_modules: The submodules of each layer that all experts share. Needed together with `layer_path`.

    Raises:
        ValueError: If a name, a reference between names, a size or a layer index is invalid.
    """

    model_type = "mote"
    routes_by_task: ClassVar[bool] = True
    pooling_modes: ClassVar[tuple[str, ...]] = ("mean", "cls", "last_token")
    compression: ClassVar[str | property | None] = None  # how experts are compressed; see `compression_mote.py`
    sub_configs: ClassVar[dict[str, Any]] = {"backbone_config": AutoConfig}

    # None stands for the defaults, which `__post_init__` fills in.
    backbone_config: PreTrainedConfig = None  # type: ignore[assignment]
    experts: list[str] = None  # type: ignore[assignment]
    tasks: dict[str, str] = None  # type: ignore[assignment]
    instructions: dict[str, str] = None  # type: ignore[assignment]
    mote_layers: str | list[int] = "every"
    pooling: str = "mean"
    default_task: str | None = "auto"
    route_by_text: bool = True
    loaded_experts: list[str] | None = None
    layer_path: str | None = None
    shared_modules: list[str] | None = None

    default_is_chosen: ClassVar[bool] = False  # in an instance: the default task was given when loading
    hidden_size = of_backbone("hidden_size", "Width of the embeddings.")
    num_hidden_layers = of_backbone("num_hidden_layers", "Number of blocks, with and without experts.")
    max_position_embeddings = of_backbone("max_position_embeddings", "Longest sequence, in tokens.")
    vocab_size = of_backbone("vocab_size", "Number of token embeddings.")

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in the defaults, and validate."""
        backbone: Any = copy.deepcopy(self.backbone_config or {"model_type": "nomic_bert"})  # it may be changed
        if isinstance(backbone, dict):
            backbone = AutoConfig.for_model(backbone.pop("model_type", None), **backbone)
        self.backbone_config = backbone
        experts = PAPER_INSTRUCTIONS if self.experts is None else self.experts
        self.experts = [experts] if isinstance(experts, str) else list(experts)
        own_names = {expert: expert for expert in self.experts}
        unseen = {task: like for task, like in UNSEEN_TASKS.items() if like in own_names}
        self.tasks = {**own_names, **unseen, **(self.tasks or {})}
        if self.instructions is None:
            self.instructions = {task: text for task, text in PAPER_INSTRUCTIONS.items() if task in own_names}
        kwargs.pop("model_type", None)  # set by the class: a subclass may be built from another class's dict
        _refuse_misspelled(kwargs, type(self))  # the base class would keep them
        super().__post_init__(**kwargs)
        self.validate()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build from a dict; `experts=[…]` among the keyword arguments selects the experts to load."""
        if (version := config_dict.get("mote_format", 1)) > 1:  # what a release changes that this one would misread
            raise ValueError(f"The model has format {version}, of a newer MoTE: pip install -U mote-embeddings")
        selected = kwargs.pop("experts", None)
        _refuse_misspelled(kwargs, cls)  # the base class would drop them
        kwargs.pop("add_pooling_layer", None)  # as of a dense model; there is none here
        fields = ("tasks", "instructions", "transformers_weights")
        given = {name: kwargs.pop(name) for name in fields if kwargs.get(name) is not None}
        stored = {name: value for name, value in config_dict.items() if name not in SIZES}
        chosen = kwargs.get("default_task")
        config, unused = super().from_dict({**stored, **given}, **{**kwargs, "return_unused_kwargs": True})
        for name in unused.keys() & config.backbone_config.to_dict().keys():  # such as a dropout, as of a dense model
            setattr(config.backbone_config, name, unused.pop(name))
        if chosen is not None:
            config.default_is_chosen = True
        config.validate() if selected is None else config.load_only(selected)
        return (config, unused) if kwargs.get("return_unused_kwargs") else config

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as a dict, and sizes of the backbone, which other programs look for."""
        settings = {**super().to_dict(), **{name: getattr(self.backbone_config, name, None) for name in SIZES}}
        settings.pop("default_is_chosen", None)
        return settings

    def load_only(self, experts: str | Iterable[str]) -> None:
        """Choose the experts whose weights to load, among those that are present."""
        selected = [experts] if isinstance(experts, str) else list(experts)
        present = self.available_experts
        for name in selected:
            require_known(name, present, "expert")
        self.loaded_experts = [name for name in present if name in selected]
        self.validate()

    def validate(self) -> None:
        """Check names, references between them, and layer indices; raise `ValueError` on the first problem."""
        self._validate_experts()
        experts, tasks = self.experts, self.tasks  # looking up an attribute of a config is slow
        for task, expert in tasks.items():
            require_known(expert, experts, f"expert of task {task!r}:")
            if task in ("auto", "none") or (task in experts and task != expert):
                raise ValueError(
                    f"Task {task!r} must go to the expert of its own name ('auto' and 'none' are not names)"
                )
        if self.default_task == "auto":
            self.default_task = GENERAL if GENERAL in experts else tasks.get("document", experts[0])
        elif self.default_task == "none":
            self.default_task = None
        if self.default_task is not None:
            require_known(self.default_task, tasks, "default_task")
        require_known(self.pooling, self.pooling_modes, "pooling")
        if (self.layer_path is None) != (self.shared_modules is None):
            raise ValueError("layer_path and shared_modules describe one architecture: set both or neither")
        self._validate_instructions()
        _ = self.mote_layer_indices
        # `task_ids` are indices into this order, which must outlive JSON, where keys are sorted.
        others = sorted(tasks.keys() - {*experts})
        self.tasks = {task: tasks[task] for task in [*experts, *others] if task in tasks}

    def _validate_experts(self) -> None:
        words = [name for name in self.experts if isinstance(name, str) and EXPERT_NAME.fullmatch(name)]
        if not words or len(set(words)) < len(self.experts):
            raise ValueError(
                f"experts must be different words of letters, digits, '_' and '-', at least one, got {self.experts}"
            )
        if self.loaded_experts is not None and not set() < set(self.loaded_experts) <= set(self.experts):
            raise ValueError(f"loaded_experts {self.loaded_experts!r} must be some of the experts {self.experts!r}")

    def _validate_instructions(self) -> None:
        tasks, texts = self.tasks, self.instructions
        for task in texts:
            require_known(task, tasks, "task of an instruction:")
        if type(self.route_by_text) is not bool:
            raise ValueError(f"route_by_text must be True or False, got {self.route_by_text!r}")
        if not self.routes_by_task:
            return
        expert_of_text: dict[str, str] = {}  # a prompt's text picks the expert
        for task, expert in tasks.items():
            if (text := texts.get(task, texts.get(expert))) and expert_of_text.setdefault(text, expert) != expert:
                raise ValueError(
                    f"The instruction {text!r} of task {task!r} already stands for the expert "
                    f"{expert_of_text[text]!r}: give the tasks of different experts different instructions"
                )

    @property
    def available_experts(self) -> list[str]:
        """The experts whose weights are present, in the order of `experts`."""
        return self.experts if self.loaded_experts is None else self.loaded_experts

    @property
    def available_tasks(self) -> dict[str, str]:
        """The tasks whose expert is present, with that expert, in the order of `tasks`."""
        return {task: expert for task, expert in self.tasks.items() if expert in self.available_experts}

    @property
    def architecture(self) -> Architecture:
        """The backbone's row of `ARCHITECTURES`, or that which the settings describe; `ValueError` if there is none."""
        model_type = self.backbone_config.model_type
        reason = REFUSED_ARCHITECTURES.get(model_type)
        if self.layer_path is not None and reason is None:
            return Architecture(self.layer_path, tuple(self.shared_modules or ()))
        if model_type not in ARCHITECTURES:
            unknown = (
                "describe it by its layer_path (of the list of layers, as in 'encoder.layer') and shared_modules (of "
                "the attention, in a layer), or `--layer-path … --shared-module …`."
                + alternatives(model_type, ARCHITECTURES)
            )
            raise ValueError(f"MoTE does not support {model_type!r}: {reason or unknown}")
        return ARCHITECTURES[model_type]

    @property
    def mote_layer_indices(self) -> list[int]:
        """Indices, from 0, of the blocks that have experts."""
        count = getattr(self.backbone_config, "num_hidden_layers", 0)  # 0: an architecture that is refused later
        if self.mote_layers == "every":
            return list(range(count))
        if self.mote_layers == "every_other" and count > 1:
            return list(range(1, count, 2))
        indices = self.mote_layers if isinstance(self.mote_layers, list | tuple) else []
        valid = all(type(index) is int and 0 <= index < count for index in indices)
        if not indices or not valid or len(set(indices)) < len(indices):
            raise ValueError(
                "mote_layers must be 'every', 'every_other' (of two layers or more) or a list of different indices, "
                f"got {self.mote_layers!r}: the backbone has {count} layers, from 0 to {count - 1}"
            )
        return sorted(indices)

    def expert_of(self, task: str | None) -> str:
        """Return the name of the expert that serves `task`; None: the `default_task`.

        Raises:
            ValueError: If the task is unknown, its expert was not loaded, or there is neither a task nor a default.
        """
        task = self._default() if task is None else task
        tasks, loaded = self.tasks, self.loaded_experts  # reading from a config of transformers takes time
        require_known(task, tasks, "task")
        if loaded is not None and tasks[task] not in loaded:
            raise ValueError(f"Task {task!r} needs the expert {tasks[task]!r}, which was not loaded: experts={loaded}")
        return tasks[task]

    def instruction_of(self, task: str) -> str:
        """Return the instruction of a task: its own, or that of its expert's task; possibly empty."""
        return self.instructions.get(task, self.instructions.get(self.tasks[task], ""))

    def task_of_prompt(self, name: str, text: str) -> str | None:
        """Return the task that a prompt belongs to, by its own name or one of MTEB's; None if there is none.

        A different wording is accepted unless it is another task's instruction.
        """
        task = name if name in self.tasks else MTEB_PROMPTS.get(name)
        known = task in self.tasks and (text == self.instruction_of(task) or text not in self._tasks_of_instructions())
        return task if known else None

    def task_of(self, inputs: Sequence[Any], task: str | None = None, prompt: str | None = None) -> str | list[str]:
        """Decide which task the inputs are for: the only place that does. The first rule that applies wins.

        1. An explicit `task`, unless it is only a role hint.
        2. The `prompt`, if it is a `TaskPrompt`, or its text an instruction of the config.
        3. The role hints `query` and `document`.
        4. The instruction that a text itself begins with, text by text; not if `route_by_text` is False.
        5. The config's `default_task`, with a warning.

        Args:
            inputs: Texts, before the prompt is put in front of them; also `{"text": …}`, or pairs of texts, of which
                the first counts.
            task: A task's name, or a role hint, for all inputs: `encode` sorts them by length.
            prompt: The text that will be put in front of each input.

        Returns:
            The task, if it is the same for all inputs, otherwise one task per input.

        Raises:
            ValueError: If the task is unknown, no rule applies, or rule 4 or 5 meets an input without a text.
        """
        if task is not None and task not in ROLE_HINTS:
            self.expert_of(task)
            return task
        if (named := getattr(prompt, "task", None)) in self.tasks:
            return named
        instructions = self._tasks_of_instructions()
        if prompt in instructions:
            return instructions[prompt]
        if task in self.tasks:
            return task
        texts = [(prompt or "") + _text_of(each) for each in inputs]
        routing = texts if self.route_by_text else [prompt or ""] * len(texts)
        found = [next((name for start, name in instructions.items() if text.startswith(start)), "") for text in routing]
        undecided = [text for text, name in zip(texts, found, strict=True) if not name]
        default = self._default(undecided, prompt) if undecided else ""
        tasks = [name or default for name in found]
        return tasks[0] if len(set(tasks)) == 1 else tasks

    def _tasks_of_instructions(self) -> dict[str, str]:
        """Return instruction → task, the longest instructions first; the paper's are known to many libraries."""
        found = {text: task for task, text in PAPER_INSTRUCTIONS.items() if task in self.tasks}
        found |= {self.instruction_of(task): task for task in reversed(self.tasks)}  # for equal texts, the first task
        return {text: found[text] for text in sorted(filter(None, found), key=len, reverse=True)}

    def _default(self, texts: Sequence[str] = ("",), prompt: str | None = None) -> str:
        """Return the task of texts for which no rule decides, with their prompt in front.

        A warning says so, once for a model and a cause, unless the default task was chosen when loading, or is that of
        the source itself, `general`.
        """
        if self.default_task is not None and (self.default_is_chosen or torch.compiler.is_compiling()):
            return self.default_task
        cause = f"the prompt {prompt[:60]!r} belongs to no task" if prompt else "no task and no prompt are given"
        nearly = None
        if self.route_by_text:
            known = {_letters(each): each for each in self._tasks_of_instructions()}
            begins = (_letters(text[: 2 * len(next(iter(known), ""))]) for text in texts)
            nearly = next((known[start] for begin in begins for start in known if begin.startswith(start)), None)
            cause += f" (did you mean {nearly!r}?)" if nearly else ""
        else:
            cause += ", and what a text begins with does not count (route_by_text=False)"
        if self.default_task == GENERAL and not prompt and nearly is None:  # the dense source, used as such
            return self.default_task
        if self.default_task is None:
            raise ValueError(
                f"No task for the text {texts[0][:60]!r}: {cause}, and the model has no default_task."
                f"{alternatives('', self.tasks)} For search, call encode_query and encode_document; else pass "
                "`prompt_name=` or `task=` (in training `prompts=`), or load with config_kwargs={'default_task': TASK}"
            )
        logger.warning_once(
            f"{self.name_or_path or 'MoTE'}: {cause}, so texts go to {self.default_task!r}, the default task. Choose "
            "by encode_query or encode_document, `prompt_name=`, `task=`, or config_kwargs={'default_task': …}."
        )
        return self.default_task

    def warn_of_instructions(self, inputs: Sequence[Any], prompt: str | None) -> None:
        """Warn, once, about a prompt in front of a text that itself begins with an instruction."""
        known = self._tasks_of_instructions() if prompt else {}
        twice = (start for text in inputs for start in known if isinstance(text, str) and text.startswith(start))
        if (found := next(twice, None)) is not None:
            logger.warning_once(
                f"The prompt {prompt!r} is put in front of a text that already begins with the instruction {found!r}: "
                "the model reads both. Keep the prompt, or the instruction in the text (a library's prefix)."
            )


def _letters(text: str) -> str:
    return "".join(text.split()).casefold()


def _text_of(value: Any) -> str:
    """Return the text of a string, of Sentence-Transformers' `{"text": …}`, or of the first of a pair of these."""
    text = value[0] if isinstance(value, list | tuple) and value else value
    text = text.get("text") if isinstance(text, dict) else text
    if not isinstance(text, str):
        raise ValueError(f"No task for the input {str(value)[:60]!r}: it has no text. Pass `task=`.")  # noqa: TRY004
    return text


MoTEConfig.register_for_auto_class()
