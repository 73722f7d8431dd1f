"""The Sentence-Transformers module of MoTE: finds out which task a text is for, and tells the model.

`modules.json` of a saved model names `MoTETransformer`; `SentenceTransformer(path, trust_remote_code=True)` loads this
file from there. It depends on sentence-transformers, transformers and torch alone.
"""

from typing import Any

import torch
from sentence_transformers.base.modules import Transformer
from transformers.dynamic_module_utils import custom_object_save

try:
    from .configuration_mote import ROLE_HINTS  # type: ignore[import-not-found]
except ImportError:  # imported as an installed top-level module rather than as remote code
    from configuration_mote import ROLE_HINTS


class MoTETransformer(Transformer):
    """A `Transformer` module whose model has task experts.

    `encode(texts, prompt_name=…)`, `prompt=…`, `task=…`, `encode_query`, `encode_document`, and texts that begin with
    an instruction reach their expert by the rules of `MoTEConfig.task_of`. A prompt puts the instruction in front and
    picks the expert; `task=` picks the expert and leaves the text as it is.

    The decision is made once, in `preprocess`, and travels with the features as `route`: the task's name, or, in a
    batch of several tasks, a tensor [B] of indices into the config's tasks, which losses that cut batches into
    mini-batches cut along with the rest.

    With a token router no expert hangs on the task: there is no `route`, a text need not tell its task, and an
    instruction is a prompt as in any dense model. `features["balance_share"]`, a number, if there is one, is handed to
    the model (see `MoTEModel.forward`).
    """

    forward_kwargs = {"task"}  # otherwise `encode(task=…)` is dropped in silence

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
            prompt: Put in front of each text; an instruction of the config decides the task.
            processing_kwargs: See the base class.
            task: A task of the config, or the hints "query" and "document".
            **kwargs: See the base class.

        Returns:
            The features of the base class, and `route`.

        Raises:
            ValueError: If the task is unknown, or cannot be told.
        """
        if "mixed_tasks" in kwargs:  # the base class measures the prompt: its tokens, whatever the task
            return super().preprocess(inputs, prompt, processing_kwargs, **kwargs)
        if not inputs:
            return {}
        if self.config.router == "token":
            if task is not None and task not in ROLE_HINTS:
                self.config.expert_of(task)  # an unknown task is an error all the same
            return super().preprocess(inputs, prompt, processing_kwargs, task=task, **kwargs)
        tasks = self.config.task_of(inputs, task, prompt)
        mixed = not isinstance(tasks, str)
        features = super().preprocess(inputs, prompt, processing_kwargs, task=task, mixed_tasks=mixed, **kwargs)
        ids = {name: i for i, name in enumerate(self.config.tasks)}
        features["route"] = torch.tensor([ids[name] for name in tasks]) if mixed else tasks
        return features

    def _should_flatten_inputs(
        self, modality: Any, processor_inputs: dict[str, Any], mixed_tasks: bool = False, **kwargs: Any
    ) -> bool:
        """Rows of several tasks must stay rows: flash attention without padding would make them one sequence."""
        return not mixed_tasks and super()._should_flatten_inputs(modality, processor_inputs, **kwargs)

    def forward(self, features: dict[str, Any], task: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Run the model.

        Args:
            features: What `preprocess` gives.
            task: Ignored where the features carry a `route`, which has taken it into account.
            **kwargs: See the base class.

        Returns:
            The features, with `token_embeddings` [B, L, H].
        """
        inputs = {name: value for name, value in features.items() if name not in ("route", "balance_share")}
        routing: dict[str, Any]
        if self.config.router == "token":
            routing = {"task": None, "balance_share": features.get("balance_share")}
        else:
            route = features.get("route", task or features.get("task"))
            routing = {"task": None, "task_ids": route} if isinstance(route, torch.Tensor) else {"task": route}
        return super().forward(inputs, **routing, **kwargs)

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Save the model, the tokenizer, the settings, and the code that loads them."""
        super().save(output_path, *args, **kwargs)
        custom_object_save(self, output_path)
