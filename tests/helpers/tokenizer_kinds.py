"""Small tokenizers of the kinds that models have, trained on a few sentences."""

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = 3 * [
    "Instruct: Given a question, retrieve passages that answer it\nQuery: how do whales breathe",
    "Whales come up for air, the bread  two spaces, naïve 中文 🐳 e\u0301",
]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def _trained(model: Any, trainer: Any, pre_tokenizer: Any, template: str | None, trim: bool = True) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    if template is not None:
        special = [("<s>", 1), ("</s>", 2)]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return tokenizer


def byte_level(trim: bool) -> Tokenizer:
    """As those of GPT-2 (with trimmed offsets), Llama 3 and Qwen: no special tokens around a text."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet)
    return _trained(models.BPE(), trainer, pre_tokenizers.ByteLevel(add_prefix_space=False), None, trim)


def sentence_piece() -> Tokenizer:
    """As those of XLM-R and T5: a blank belongs to the word behind it, `<s>` in front, `</s>` behind."""
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>")
    return _trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(), "<s> $A </s>")


def sentence_piece_bpe() -> Tokenizer:
    """As Mistral's: `<s>` in front, nothing behind, and texts are not split into words first."""
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL)
    tokenizer = _trained(models.BPE(), trainer, pre_tokenizers.Metaspace(), "<s> $A")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    return tokenizer


def fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=200
    )
