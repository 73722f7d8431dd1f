"""Spans of a document, which are each other's contexts, for CoT-MAE."""

import random
import re
from dataclasses import dataclass
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from mote.training.pretraining_recipe import SpanSettings

KINDS = ("nearby", "random", "overlap")
REACH = 100  # spans on either side, among which a random one is drawn

_SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+|\s*\n\s*|(?<=[。！？])")  # noqa: RUF001  # so intended


@dataclass(frozen=True)
class SplitDocument:
    """A text that was split into sentences, grouped into spans."""

    sentences: tuple[str, ...]
    lengths: tuple[int, ...]  # tokens of each sentence
    spans: tuple[tuple[int, int], ...]  # first sentence of each, and the one after its last
    longest: int  # approximate number of tokens in a span

    def __str__(self) -> str:
        return "".join(self.sentences)

    def text_of(self, span: tuple[int, int]) -> str:
        """Return the text of some sentences."""
        return "".join(self.sentences[slice(*span)])

    def draw(self, kind: str, rng: random.Random) -> tuple[str, str]:
        """Draw a span and a context for it: `nearby`, `random`, `overlap`, or `mixed`, one of these."""
        anchor = rng.randrange(len(self.spans))
        if kind == "mixed":
            kind = rng.choice(KINDS)
        if kind == "overlap":
            return self.text_of(self.spans[anchor]), self.text_of(self._overlapping(anchor, rng))
        reach = 1 if kind == "nearby" else REACH
        near = range(max(0, anchor - reach), min(len(self.spans), anchor + reach + 1))
        context = rng.choice([other for other in near if other != anchor])
        return self.text_of(self.spans[anchor]), self.text_of(self.spans[context])

    def _overlapping(self, anchor: int, rng: random.Random) -> tuple[int, int]:
        """Return up to half of a span's sentences with those after it; of the last span, with those before it."""
        first, end = self.spans[anchor]
        shared = rng.randint(1, max(1, (end - first) // 2))
        if anchor < len(self.spans) - 1:
            first, end = end - shared, end + 1
            while end < len(self.sentences) and sum(self.lengths[first:end]) < self.longest:
                end += 1
        else:
            first, end = first - 1, first + shared
            while first > 0 and sum(self.lengths[first:end]) < self.longest:
                first -= 1
        return first, end


def split_into_spans(
    text: str, tokenizer: PreTrainedTokenizerBase, settings: SpanSettings, seed: object
) -> SplitDocument | None:
    """Split a text into sentences, and add these to a span until it is long enough; None if there are not two spans."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    pieces = [text[start:end] for start, end in pairwise(dict.fromkeys([0, *ends, len(text)]))]
    sentences = tuple(piece for piece in pieces if piece.strip())
    if len(sentences) < 2:
        return None
    tokens = tokenizer([*sentences], add_special_tokens=False, verbose=False)["input_ids"]
    lengths = tuple(map(len, tokens))
    rng = random.Random(f"{seed} spans {text}")
    spans, first, length = [], 0, 0
    target = settings.draw_length(rng)
    for number, count in enumerate(lengths, start=1):
        length += count
        if length >= target or number == len(lengths):
            spans.append((first, number))
            first, length, target = number, 0, settings.draw_length(rng)
    return SplitDocument(sentences, lengths, tuple(spans), settings.length) if len(spans) > 1 else None
