"""The Sentence-Transformers module of MoTE: decides which task a text is for, and passes it to the model.

`SentenceTransformer(path, trust_remote_code=True)` loads this file, which a saved model's `modules.json` names.
"""

import re
from typing import Any

import torch
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils.versions import require_version

HINT = 'A MoTE needs: pip install -U "transformers>=5.17" "sentence-transformers>=6.0", or `mote export` an expert'
require_version("transformers>=5.17", HINT)
require_version("sentence-transformers>=6.0", HINT)

from sentence_transformers import SentenceTransformerModelCardData  # noqa: E402
from sentence_transformers.base.modules import Transformer  # noqa: E402  # a name that older versions lack


class MoTECardData(SentenceTransformerModelCardData):
    """The card that Sentence-Transformers writes for a model that it has trained, with what a MoTE needs."""

    def generate_usage_snippet(self) -> str:
        """Add `trust_remote_code`, a task, and the table of tasks."""
        config: Any = self.model[0].config  # type: ignore[index]  # there is a model whenever a card is written
        snippet = super().generate_usage_snippet().replace('")\n', '", trust_remote_code=True)\n', 1)
        snippet = snippet.replace("encode(sentences)", f'encode(sentences, task="{config.available_experts[0]}")')
        row = "| `{}` | `{}` | `{!r}` |".format
        rows = [row(name, expert, config.instruction_of(name)) for name, expert in config.available_tasks.items()]
        return "\n".join([snippet, "", "| task | expert | instruction |", "| --- | --- | --- |", *rows, ""])

    def compute_dataset_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """Count tokens; columns without a task (documents, for example) are counted as for the first expert."""
        config: Any = self.model[0].config  # type: ignore[index]
        default, config.default_task = config.default_task, config.default_task or config.available_experts[0]
        try:
            return super().compute_dataset_metrics(*args, **kwargs)
        finally:
            config.default_task = default


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
    mini-batches cut along with the rest.
    """

    forward_kwargs = {"task"}  # otherwise `encode(task=…)` would be silently ignored

    def __init__(self, *args: Any, backend: str = "torch", **kwargs: Any) -> None:
        if backend != "torch":
            raise ValueError(
                f"A MoTE runs on torch alone. For backend={backend!r}, export an expert: "
                f"`mote export MODEL --expert NAME --backend {backend} --out DIR`"
            )
        super().__init__(*args, backend=backend, **kwargs)

    def __repr__(self) -> str:
        shown = {"experts": self.config.available_experts, "tasks": list(self.config.tasks)}
        shown |= {name: getattr(self.config, name) for name in ("default_task", "route_by_text")}
        shown |= {"backbone": self.config.backbone_config.model_type, "max_seq_length": self.max_seq_length}
        return f"{type(self).__name__}({shown})"

    def preprocess(
        self,
        inputs: Any,
        prompt: str | None = None,
        processing_kwargs: Any = None,
        task: str | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Tokenize, and decide on the task.

        Args:
            inputs: Texts.
            prompt: Text to put in front of each text; a `TaskPrompt` or an instruction of the config decides the task.
            processing_kwargs: See the base class.
            task: A task of the config, or the hints "query" and "document".
            **kwargs: See the base class.

        Returns:
            The features of the base class, and `route`.

        Raises:
            ValueError: If the task is unknown, no rule decides on one, or the prompt is a list.
        """
        if "mixed_tasks" in kwargs:  # called by the base class to count the prompt's tokens, whatever the task
            return super().preprocess(inputs, prompt, processing_kwargs, **kwargs)
        if not inputs:
            return {}
        require_one_prompt(prompt)
        prompt = self.prompt_for(task, prompt)
        tasks = self.config.task_of(inputs, task, prompt)
        self.config.warn_of_instructions(inputs, prompt)
        mixed = not isinstance(tasks, str)
        features = super().preprocess(inputs, prompt, processing_kwargs, task=task, mixed_tasks=mixed, **kwargs)
        features["route"] = torch.tensor([list(self.config.tasks).index(name) for name in tasks]) if mixed else tasks
        return features

    def prompt_for(self, task: str | None, prompt: Any) -> Any:
        """Return the prompt; None for the default one if `task=` names another task, whose texts stay as they are."""
        default = getattr(getattr(self, "owner", None), "default_prompt_name", None)  # which can change after loading
        is_default = default is not None and getattr(prompt, "name", None) == default
        return None if is_default and self.config.task_of([""], task, prompt) != prompt.task else prompt

    def _should_flatten_inputs(self, *args: Any, mixed_tasks: bool = False, **kwargs: Any) -> bool:
        """Keep rows of several tasks apart: flash attention without padding would concatenate them."""
        return not mixed_tasks and super()._should_flatten_inputs(*args, **kwargs)

    def forward(self, features: dict[str, Any], task: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Run the model.

        Args:
            features: The output of `preprocess`.
            task: Ignored if the features have a `route`, which already reflects it.
            **kwargs: See the base class.

        Returns:
            The features, with `token_embeddings` [B, L, H].
        """
        route = features.get("route", task or features.get("task"))
        if isinstance(route, torch.Tensor) and hasattr(self.model, "peft_config"):  # whose `task_ids` are its own
            route = [list(self.config.tasks)[index] for index in route.tolist()]
        routing = {"task": None, "task_ids": route} if isinstance(route, torch.Tensor) else {"task": route}
        out = super().forward({name: value for name, value in features.items() if name != "route"}, **routing, **kwargs)
        features.update(out)  # as the base class leaves them; losses over layers read them there
        return out

    def on_model_ready(self, model: Any) -> None:
        """Let prompts know their tasks, make the card that is saved with the model a MoTE's, and correct its text."""
        for name, text in model.prompts.items():
            if task := self.config.task_of_prompt(name, text):
                model.prompts[name] = TaskPrompt(text)
                model.prompts[name].task = task
                model.prompts[name].name = name
        object.__setattr__(self, "owner", model)  # not as a module of this one
        card, text = model.model_card_data, model._model_card_text or ""
        card.__class__ = MoTECardData if type(card) is SentenceTransformerModelCardData else type(card)
        card.add_tags(self.model.model_tags)
        for name, value in re.findall(r"(?m)^(base_model|license): (\S+)$", text):
            setattr(card, name, getattr(card, name) or value)
        model._model_card_text = re.sub(r"(?m)^> \*\*Not trained yet(.*\n>)*.*\n+", "", text) or None

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Save the model, the tokenizer, the settings, and the code that loads them."""
        super().save(output_path, *args, **kwargs)
        custom_object_save(self, output_path)


def require_one_prompt(prompt: Any) -> None:
    """Raise `ValueError` if there is a list of prompts, which only `InstructedTransformer` takes."""
    if prompt is not None and not isinstance(prompt, str):
        raise ValueError(
            f"The prompt must be one text for all inputs, got a {type(prompt).__name__}: call it once per prompt, put "
            "each text's instruction in front of it, or set instruction_pooling=excluded, which takes a list"
        )
