"""Masked batches of pre-training: of texts, or for CoT-MAE of texts and their contexts.

What is drawn for a row depends only on the seed, the epoch and its index, so that a resumed run draws the same masks.
"""

import random
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase, TrainerCallback

from mote.remote.configuration_mote import MoTEConfig
from mote.training.pretraining_recipe import MaskingSettings, PretrainingRecipe
from mote.training.spans import SplitDocument


class TextRows(Dataset):
    """Tokenized texts of several tasks, each with the seed of its masks; for CoT-MAE each with its context.

    Args:
        items: Task → its texts: strings, pairs of a text and its context, or documents of which two spans are drawn.
        recipe: The recipe.
        config: Config of the model, with its tasks and instructions.
        tokenizer: Tokenizer of the model, which truncates to its `model_max_length`.

    Attributes:
        epoch: The epoch, so that masks differ between epochs.
    """

    def __init__(
        self,
        items: Mapping[str, Sequence[Any]],
        recipe: PretrainingRecipe,
        config: MoTEConfig,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.rows = [(task, item) for task, found in items.items() for item in found]
        self.recipe, self.config, self.tokenizer = recipe, config, tokenizer
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        task, item = self.rows[index]
        settings, seed = self.recipe.tasks[task], f"{self.recipe.training.seed} {self.epoch} {index}"
        if isinstance(item, str):
            return self._encoded(item, task, seed)
        text, context = item.draw(settings.context, random.Random(seed)) if isinstance(item, SplitDocument) else item
        return {
            "text": self._encoded(text, task, f"{seed} text"),
            "context": self._encoded(context, settings.context_task or task, f"{seed} context"),
        }

    def _encoded(self, text: str, task: str, seed: str) -> dict[str, Any]:
        encoded = self.tokenizer(
            (self.config.instruction_of(task) if self.recipe.model.instructions else "") + text,
            truncation=True,
            return_special_tokens_mask=True,
            return_offsets_mapping=self.recipe.masking.whole_words,
        )
        task_id = {"task_ids": list(self.config.tasks).index(task)} if self.config.routes_by_task else {}
        return {**encoded, **task_id, "seed": seed}


class SetEpoch(TrainerCallback):
    """Tells the rows the epoch: accelerate does not if an epoch is resumed or shared by several processes."""

    def __init__(self, rows: TextRows) -> None:
        self.rows = rows

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the epoch."""
        self.rows.epoch = int(state.epoch)


class Masking(DataCollatorForLanguageModeling):
    """Transformers' collator, drawing the masks of a batch from the seeds in its rows.

    Args:
        tokenizer: Tokenizer of the model.
        settings: Which tokens are masked.

    Raises:
        ValueError: If the tokenizer has no mask token, or does not show where words end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: MaskingSettings) -> None:
        whole: dict[str, Any] = {}
        if settings.whole_words:
            whole = {"whole_word_mask": True, "mask_replace_prob": 1.0, "random_replace_prob": 0.0}
            encoded = tokenizer("one two", add_special_tokens=False, return_offsets_mapping=True)
            # A word ends where the next token does not start: with offsets that hold spaces, a text would be one word.
            if not any(before[1] < after[0] for before, after in pairwise(encoded["offset_mapping"])):
                raise ValueError(
                    "masking.whole_words needs a tokenizer whose offsets leave out the spaces between words, as "
                    f"those of {type(tokenizer).__name__} do not"
                )
        super().__init__(tokenizer, mlm_probability=settings.rate, **whole)

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        """Mask a batch."""
        seeds = "\n".join(example.pop("seed") for example in examples)
        seed = int.from_bytes(blake2b(seeds.encode(), digest_size=7).digest(), "big")
        self.generator = torch.Generator().manual_seed(seed)
        if self.whole_word_mask:
            # The tokenizer does not pad offsets.
            length = max(len(example["input_ids"]) for example in examples)
            for example in examples:
                offsets = example["offset_mapping"]
                padding = [(0, 0)] * (length - len(offsets))
                left = self.tokenizer.padding_side == "left"
                example["offset_mapping"] = [*padding, *offsets] if left else [*offsets, *padding]
        return super().torch_call(examples)


class MaskedBatches:
    """Makes batches of texts, masked for the encoder; for CoT-MAE with contexts, masked or not, for the decoder.

    Args:
        tokenizer: Tokenizer of the model.
        recipe: The recipe.

    Raises:
        ValueError: As from `Masking`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, recipe: PretrainingRecipe) -> None:
        self.tokenizer, self.settings = tokenizer, recipe.decoder
        self.encoder = Masking(tokenizer, recipe.masking)
        self.decoder = Masking(tokenizer, recipe.masking.updated(rate=recipe.decoder.masking_rate))

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Make a batch: the arguments of `Pretraining.forward`. Each text is followed by its context, if it has one."""
        if "context" not in examples[0]:
            return self.encoder(examples)
        pairs = [(example["text"], example["context"]) for example in examples]
        if self.settings.both_sides:
            pairs = [sides for text, context in pairs for sides in ((text, context), (context, text))]
        batch = self.encoder([{**text} for text, _ in pairs])
        targets = [{**target, "seed": f"{target['seed']} decoder"} for _, target in pairs]
        if self.settings.kind == "bidirectional":
            decoder = self.decoder(targets)
        else:
            unmasked = [{name: one[name] for name in ("input_ids", "attention_mask")} for one in targets]
            decoder = dict(self.tokenizer.pad(unmasked, return_tensors="pt"))
            decoder["labels"] = decoder["input_ids"].masked_fill(decoder["attention_mask"] == 0, -100)
        names = ("input_ids", "attention_mask", "labels")
        return {**batch, **{f"decoder_{name}": decoder[name] for name in names}}
