"""Batches of texts and their contexts, for CoT-MAE.

What is drawn for a row depends only on the seed, the epoch and its index, as in `texts.py`.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from mote.training.pretraining_recipe import PretrainingRecipe
from mote.training.spans import Document
from mote.training.texts import Masking


class ContextRows(Dataset):
    """Tokenized texts of several tasks, each with a context.

    Args:
        items: Task → its documents, or pairs of a text and its context.
        recipe: The recipe.
        prefixes: Task → text in front of each text, for tasks that have one.
        task_ids: Task → its index in the config; None: a text's task makes no difference.
        tokenizer: Tokenizer of the model, which truncates to its `model_max_length`.

    Attributes:
        epoch: The epoch, so that spans and masks differ between epochs.
    """

    def __init__(
        self,
        items: Mapping[str, Sequence[Document | tuple[str, str]]],
        recipe: PretrainingRecipe,
        prefixes: Mapping[str, str],
        task_ids: Mapping[str, int] | None,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.rows = [(task, item) for task, found in items.items() for item in found]
        self.recipe, self.prefixes, self.task_ids, self.tokenizer = recipe, prefixes, task_ids, tokenizer
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        task, item = self.rows[index]
        settings = self.recipe.tasks[task]
        draw = f"{self.recipe.training.seed} {self.epoch} {index}"
        text, context = item.draw(settings.context, random.Random(draw)) if isinstance(item, Document) else item
        return {
            "text": self._encoded(text, task, f"{draw} text"),
            "context": self._encoded(context, settings.context_task or task, f"{draw} context"),
        }

    def _encoded(self, text: str, task: str, draw: str) -> dict[str, Any]:
        encoded = self.tokenizer(
            self.prefixes.get(task, "") + text,
            truncation=True,
            return_special_tokens_mask=True,
            return_offsets_mapping=self.recipe.masking.whole_words,
        )
        return {**encoded, **({} if self.task_ids is None else {"task_ids": self.task_ids[task]}), "draw": draw}


class ContextMasking:
    """Makes batches of texts and contexts: masked for the encoder, differently masked or unmasked for the decoder.

    Args:
        tokenizer: Tokenizer of the model.
        recipe: The recipe.

    Raises:
        ValueError: As from `Masking`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, recipe: PretrainingRecipe) -> None:
        self.tokenizer, self.settings = tokenizer, recipe.decoder
        self.encoder = Masking(tokenizer, recipe.masking)
        self.decoder = Masking(tokenizer, recipe.masking.model_copy(update={"rate": recipe.decoder.masking_rate}))

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Make a batch: the arguments of `Pretraining.forward`. Each text is followed by its context."""
        pairs = [(example["text"], example["context"]) for example in examples]
        if self.settings.both_sides:
            pairs = [sides for text, context in pairs for sides in ((text, context), (context, text))]
        batch = self.encoder([{**text} for text, _ in pairs])
        targets = [{**target, "draw": f"{target['draw']} decoder"} for _, target in pairs]
        if self.settings.kind == "bidirectional":
            decoder = self.decoder(targets)
        else:
            unmasked = [{name: one[name] for name in ("input_ids", "attention_mask")} for one in targets]
            decoder = dict(self.tokenizer.pad(unmasked, return_tensors="pt"))
            decoder["labels"] = decoder["input_ids"].masked_fill(decoder["attention_mask"] == 0, -100)
        names = ("input_ids", "attention_mask", "labels")
        return {**batch, **{f"decoder_{name}": decoder[name] for name in names}}
