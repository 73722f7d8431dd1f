"""Batches of several tasks: cut into groups of rows that run together, and put together again.

A group has one expert and rows of about the same length. It ends with its longest row, so that less padding is computed
than in the dense model, which computes all of it. Nothing is copied that need not be: rows that follow each other are
views, and each group's results are written into those of the batch.

This file is copied into every saved model and loaded from there (`trust_remote_code=True`), so it depends on torch
alone.
"""

from typing import Any, NamedTuple

import torch

# How many tokens of padding a group may hold before it is cut in two: what another pass through the model costs, in
# tokens. A GPU computes thousands in the time that Python takes to start a pass.
PADDING_PER_GROUP = {"cpu": 64}
PADDING_PER_GROUP_ELSEWHERE = 8192


class Group(NamedTuple):
    """Rows of a batch that run together.

    Attributes:
        expert: The expert's name.
        rows: Where they are in the batch: a slice if they follow each other, otherwise indices [b].
        length: Of the longest row. The columns past it hold padding alone.
    """

    expert: str
    rows: slice | torch.Tensor
    length: int

    def select(self, value: Any, batch_size: int) -> Any:
        """Take the group's rows of a tensor that has one per sequence; leave other values as they are."""
        has_rows = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == batch_size
        return value[self.rows] if has_rows else value

    def write(self, part: Any, whole: Any, batch_size: int, length: int) -> Any:
        """Write what the group gave into what the batch gives.

        Args:
            part: [b, H], [b, l, H], attentions [b, heads, l, l], or a tuple of such tensors, one per layer.
            whole: The same of the batch, with the rows of other groups; none before the first.
            batch_size: B.
            length: L.

        Returns:
            `whole`, [B, H], [B, L, H] or [B, heads, L, L]: zeros where a group is shorter.
        """
        if isinstance(part, tuple):
            layers = [None] * len(part) if whole is None else whole
            return tuple(self.write(one, other, batch_size, length) for one, other in zip(part, layers, strict=True))
        columns = part.dim() - 2  # dimensions that count tokens: none, one, or two
        if whole is None:
            size = {0: part.shape[1:], 1: (length, *part.shape[2:]), 2: (part.shape[1], length, length)}[columns]
            whole = part.new_zeros(batch_size, *size)
        view = whole[:, : self.length] if columns == 1 else whole
        view = view[..., : self.length, : self.length] if columns == 2 else view
        view[self.rows] = part
        return whole


def groups_of(
    experts: list[str], attention_mask: torch.Tensor | None, length: int, device: torch.device
) -> list[Group]:
    """Sort the rows of a batch by expert and length, and cut them into groups.

    Args:
        experts: The expert of each row, [B].
        attention_mask: 1 for tokens, 0 for padding, [B, L]; none, or of another shape: all rows are of full length.
        length: L.
        device: Of the batch.

    Returns:
        The groups of one expert follow each other.
    """
    lengths = [length] * len(experts)
    if attention_mask is not None and attention_mask.dim() == 2:
        ends = torch.arange(1, length + 1, device=device)  # padding on the left stays: positions must not move
        lengths = ((attention_mask != 0) * ends).amax(dim=1).clamp(min=1).tolist()
    rows_of: dict[str, list[int]] = {}
    for row, expert in enumerate(experts):
        rows_of.setdefault(expert, []).append(row)
    padding = PADDING_PER_GROUP.get(device.type, PADDING_PER_GROUP_ELSEWHERE)
    return [
        Group(expert, _place_of(part, device), max(lengths[row] for row in part))
        for expert, rows in rows_of.items()
        for part in _cut(rows, lengths, padding)
    ]


def _cut(rows: list[int], lengths: list[int], padding: int) -> list[list[int]]:
    """Cut rows, from the shortest to the longest, into parts that hold no more padding than this many tokens."""
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


def _place_of(rows: list[int], device: torch.device) -> slice | torch.Tensor:
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)
