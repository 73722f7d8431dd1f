"""Batches of several tasks: split into groups of rows that run together, and merged again.

A group has one expert and rows of similar length. It is cut to its longest row, so less padding is computed than in the
dense model. Consecutive rows are views, and a group's results are written into the results of the batch.
This file is copied into every saved model and loaded from there. It depends on torch alone.
"""

from collections import defaultdict
from typing import Any, NamedTuple

import torch

# Tokens of padding that a group may hold before it is split: the cost of another pass through the model, in tokens. A
# GPU processes thousands of tokens in the time that Python takes to start a pass.
PADDING_PER_GROUP = defaultdict(lambda: 8192, cpu=64)


class Group(NamedTuple):
    """Rows of a batch that run together."""

    expert: str  # name of the rows' expert
    rows: slice | torch.Tensor  # positions in the batch: a slice if they are consecutive, otherwise indices [b]
    length: int  # of the longest row; the columns past it hold only padding

    def select(self, value: Any, batch_size: int) -> Any:
        """Return the group's rows of a tensor with one row per sequence; return other values unchanged."""
        has_rows = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == batch_size
        return value[self.rows] if has_rows else value

    def write(self, part: Any, whole: Any, batch_size: int, length: int) -> Any:
        """Write an output of the group into the batch's, `whole` (None before the first group), and return that.

        [b, H] goes into [B, H], [b, l, H] into [B, L, H], attentions [b, heads, l, l] into [B, heads, L, L], and tuples
        of these layer by layer. What no group writes is zero.
        """
        if isinstance(part, tuple):
            layers = [None] * len(part) if whole is None else whole
            return tuple(self.write(one, other, batch_size, length) for one, other in zip(part, layers, strict=True))
        columns = part.dim() - 2  # number of dimensions that count tokens: 0, 1 or 2
        if whole is None:
            size = {0: part.shape[1:], 1: (length, *part.shape[2:]), 2: (part.shape[1], length, length)}[columns]
            whole = part.new_zeros(batch_size, *size)
        view = whole[:, : self.length] if columns == 1 else whole
        view = view[..., : self.length, : self.length] if columns == 2 else view
        view[self.rows] = part
        return whole


def lengths_of(attention_mask: torch.Tensor | None, rows: int, length: int) -> list[int]:
    """Return the length of each row up to its last token: [B, L] → [B].

    Without an attention mask [B, L], or with one of another shape, all rows have full length.
    """
    if attention_mask is None or attention_mask.dim() != 2:
        return [length] * rows
    # Padding on the left stays: positions must not move.
    ends = torch.arange(1, length + 1, device=attention_mask.device)
    return ((attention_mask != 0) * ends).amax(dim=1).clamp(min=1).tolist()


def groups_of(experts: list[str], lengths: list[int], device: torch.device) -> list[Group]:
    """Sort rows by expert and length, and split them into groups; those of one expert follow each other."""
    rows_of: dict[str, list[int]] = {}
    for row, expert in enumerate(experts):
        rows_of.setdefault(expert, []).append(row)
    return [
        Group(expert, positions(part, device), max(lengths[row] for row in part))
        for expert, rows in rows_of.items()
        for part in split(rows, lengths, PADDING_PER_GROUP[device.type])
    ]


def positions(rows: list[int], device: torch.device) -> slice | torch.Tensor:
    """Return an index that selects these rows, in this order."""
    consecutive = slice(rows[0], rows[0] + len(rows))
    return consecutive if rows == [*range(rows[0], consecutive.stop)] else torch.tensor(rows, device=device)


def split(rows: list[int], lengths: list[int], padding: int) -> list[list[int]]:
    """Split rows, from the shortest to the longest, into parts with at most `padding` tokens of padding each."""
    parts: list[list[int]] = [[]]
    in_part = 0
    for row in sorted(rows, key=lengths.__getitem__):
        if parts[-1]:
            in_part += len(parts[-1]) * (lengths[row] - lengths[parts[-1][-1]])
        if in_part > padding:
            parts.append([])
            in_part = 0
        parts[-1].append(row)
    return [sorted(part) for part in parts]
