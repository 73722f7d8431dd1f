"""The Sentence-Transformers module of MoTE: decides which task a text is for, and passes it to the model.

`SentenceTransformer(path, trust_remote_code=True)` loads this file, which a saved model's `modules.json` names.
"""

import re
from importlib import import_module
from typing import Any

import torch
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import logging
from transformers.utils.versions import require_version

from .configuration_mote import INSTALL, ROLE_HINTS, as_imported

require_version("sentence-transformers>=6.0", INSTALL)

from sentence_transformers import SentenceTransformerModelCardData, SparseEncoderModelCardData  # noqa: E402
from sentence_transformers.base.model_card import BaseModelCardData  # noqa: E402
from sentence_transformers.base.modules import Transformer  # noqa: E402  # missing in older versions

logger: Any = logging.get_logger(__name__)


class MoTECard(BaseModelCardData):
    """What a MoTE needs in the card that Sentence-Transformers writes for a model that it has trained."""

    def generate_usage_snippet(self) -> str:
        """Add `trust_remote_code`, a task, and the table of tasks."""
        config: Any = self.model[0].config  # type: ignore[index]  # there is a model whenever a card is written
        snippet = super().generate_usage_snippet().replace('")\n', '", trust_remote_code=True)\n', 1)
        snippet = snippet.replace("encode(sentences)", f'encode(sentences, task="{config.available_experts[0]}")')
        row = "| `{}` | `{}` | `{!r}` |".format
        rows = [row(name, expert, config.instruction_of(name)) for name, expert in config.available_tasks.items()]
        return "\n".join([snippet, "", "| task | expert | instruction |", "| --- | --- | --- |", *rows, ""])

    def set_model_id(self, model_id: str) -> None:
        """Tell the model where it will be pushed to; `push_to_hub` calls this before it saves."""
        super().set_model_id(model_id)
        self.model[0].repo_id = model_id  # type: ignore[index]

    def compute_dataset_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """Count tokens; columns without a task (documents, for example) are counted as for the first expert."""
        config: Any = self.model[0].config  # type: ignore[index]
        before = config.default_task, config.default_is_chosen
        config.default_task, config.default_is_chosen = config.default_task or config.available_experts[0], True
        try:
            return super().compute_dataset_metrics(*args, **kwargs)
        finally:
            config.default_task, config.default_is_chosen = before


class MoTECardData(MoTECard, SentenceTransformerModelCardData):
    """The card of an encoder of dense vectors."""


class SparseMoTECardData(MoTECard, SparseEncoderModelCardData):
    """The card of an encoder of sparse or hybrid vectors."""


CARDS = {SentenceTransformerModelCardData: MoTECardData, SparseEncoderModelCardData: SparseMoTECardData}


class TaskPrompt(str):
    """An instruction, possibly empty, and its task: of `encode(prompt_name=…)`, only the text reaches a module."""

    task: str
    name: str  # among the model's prompts


class MoTETransformer(Transformer):
    """A `Transformer` module whose model has task experts.

    `encode(texts, prompt_name=…)`, `prompt=…`, `task=…`, `encode_query`, `encode_document`, and texts that begin with
    an instruction reach their expert by the rules of `MoTEConfig.task_of`. A prompt puts the instruction in front and
    picks the expert; `task=` picks the expert and leaves the text as it is.

    The decision is made once, in `preprocess`, and travels with the features as `route`: the task's name, or, in a
    batch of several tasks, a tensor [B] of indices into the config's tasks, which losses that cut batches into
    mini-batches cut along with the rest. If the model does not route by task, there is no `route`.
    """

    forward_kwargs = {"task"}  # otherwise `encode(task=…)` would be silently ignored
    repo_id: str | None = None  # of the repository that what is saved next is pushed to
    way: Any = 0  # into the graphs of the calls of a step, for DDP

    def __init__(self, *args: Any, backend: str = "torch", **kwargs: Any) -> None:
        if backend != "torch":
            export = f"export an expert: `mote export MODEL --expert NAME --backend {backend} --out DIR`"
            raise ValueError(f"A MoTE runs on torch alone. For backend={backend!r}, {export}")
        super().__init__(*args, backend=backend, **kwargs)

    def preprocess(
        self,
        inputs: Any,
        prompt: str | None = None,
        processing_kwargs: Any = None,
        task: str | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Tokenize, and decide on the task: the features of the base class, and `route`."""
        # The base class calls this to count the prompt's tokens, whatever the task.
        if "mixed_tasks" in kwargs:
            return super().preprocess(inputs, prompt, processing_kwargs, **kwargs)
        if not inputs:
            return {}
        if prompt is not None and not isinstance(prompt, str):
            raise ValueError(
                f"prompt must be a string, for all texts, got {type(prompt).__name__}: `encode` sorts the texts. Call "
                "it once per prompt, or let each text begin with its instruction"
            )
        prompt = self.prompt_for(task, prompt)
        route = self.route_of(inputs, task, prompt)
        self.config.warn_of_instructions(inputs, prompt)
        mixed = isinstance(route, list)
        features = super().preprocess(inputs, prompt, processing_kwargs, task=task, mixed_tasks=mixed, **kwargs)
        if route is not None:
            features["route"] = self.task_ids_of(route) if isinstance(route, list) else route
        return features

    def route_of(self, inputs: Any, task: str | None, prompt: str | None) -> str | list[str] | None:
        """Return the task of the texts, or a list with the task of each; None if the model does not route by task."""
        if self.config.routes_by_task:
            return self.config.task_of(inputs, task, prompt)
        if task is not None and task not in ROLE_HINTS:
            self.config.expert_of(task)  # an unknown task is an error even where it has no effect
        return None

    def task_ids_of(self, tasks: list[str]) -> torch.Tensor:
        """Return the index of each row's task among the config's tasks, [B]."""
        return torch.tensor([list(self.config.tasks).index(name) for name in tasks])

    def prompt_for(self, task: str | None, prompt: Any) -> Any:
        """Return the prompt; None for the default one if `task=` names another task, whose texts stay as they are."""
        # Asked at each call, because the default can change after loading.
        default = getattr(getattr(self, "owner", None), "default_prompt_name", None)
        is_default = default is not None and getattr(prompt, "name", None) == default
        return None if is_default and self.config.task_of([""], task, prompt) != prompt.task else prompt

    def _should_flatten_inputs(self, *args: Any, mixed_tasks: bool = False, **kwargs: Any) -> bool:
        """Keep rows of several tasks apart: flash attention without padding would concatenate them."""
        return not mixed_tasks and super()._should_flatten_inputs(*args, **kwargs)

    def forward(self, features: dict[str, Any], task: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Add `token_embeddings` [B, L, H] to the features. A `route` among them already reflects `task`."""
        route = features.get("route", task or features.get("task")) if self.config.routes_by_task else None
        if isinstance(route, torch.Tensor) and hasattr(self.model, "peft_config"):  # whose `task_ids` are its own
            route = [list(self.config.tasks)[index] for index in route.tolist()]
        routing = {"task": None, "task_ids": route} if isinstance(route, torch.Tensor) else {"task": route}
        known: Any = self.model.arguments
        inputs = {name: value for name, value in features.items() if name in known or name == "modality"}
        features.update(super().forward(inputs, **routing, **kwargs))
        out = features["token_embeddings"]
        if out.requires_grad and torch.distributed.is_available() and torch.distributed.is_initialized():
            # DDP takes an expert for unused if no tensor of the *last* call leads to it, but a loss calls the model for
            # each column. So a call also returns a way back into the earlier ones, until a backward pass begins.
            self.way = features["way"] = out[:0].sum() + self.way
            out.register_hook(lambda _: setattr(self, "way", 0))
        return features

    def on_model_ready(self, model: Any) -> None:
        """Attach their tasks to the prompts, and make the card that is saved with the model that of a MoTE.

        An empty prompt does not replace an instruction: libraries pass one where their user gave none.
        """
        if type(self.model).__module__.startswith("mote.remote.") and __package__ != "mote.remote":  # by `mote.auto`
            for module in model:
                package, _, file = type(module).__module__.rpartition(".")
                if package == __package__:
                    module.__class__ = getattr(import_module(f"mote.remote.{file}"), type(module).__name__)
            self.on_model_ready(model)
            return
        as_imported()
        for name, text in model.prompts.items():
            if task := self.config.task_of_prompt(name, text):
                if not text and (text := self.config.instruction_of(task)):
                    logger.warning("The prompt %r is empty: using %r, the instruction of %r", name, text, task)
                model.prompts[name] = TaskPrompt(text)
                model.prompts[name].task = task
                model.prompts[name].name = name
        object.__setattr__(self, "owner", model)  # not as a module of this one
        card, text = model.model_card_data, model._model_card_text or ""
        card.__class__ = CARDS.get(type(card), type(card))
        card.add_tags(self.model.model_tags)
        for name, value in re.findall(r"(?m)^(base_model|license): (\S+)$", text):
            setattr(card, name, getattr(card, name) or value)
        model._model_card_text = re.sub(r"(?m)^> \*\*Not trained yet(.*\n>)*.*\n+", "", text) or None

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Save the model, the tokenizer, the settings, and the code that loads them."""
        repo_id, self.repo_id = self.repo_id, None
        with self.model.replacing(repo_id):  # type: ignore[operator]
            super().save(output_path, *args, **kwargs)
        custom_object_save(self, output_path)
