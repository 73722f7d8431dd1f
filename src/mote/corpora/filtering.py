"""`mote filter`: a pair stays if a model finds its positive among the other documents (consistency filtering).

Nussbaum and Duderstadt, arXiv:2502.07972, section 4.2: within shards of a million pairs, the document must be among the
two nearest to its query (after Wang et al., "Text Embeddings by Weakly-Supervised Contrastive Pre-training",
arXiv:2212.03533, section 3.1).
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mote.corpora.options import FilterOptions
from mote.corpora.pairs import PairTexts, Ranker, read_pairs, score_rows
from mote.corpora.runs import map_blocks, run_datasets
from mote.data.rows import Location

EXAMPLES = 20  # of dropped pairs, in the record


def filter_pairs(
    datasets: Sequence[str], out: str | Path, model: str | Path, options: FilterOptions | None = None, **settings: Any
) -> Path:
    """Copy datasets of pairs, without the pairs that a model does not confirm.

    The same call resumes an interrupted run.

    Args:
        datasets: Paths and patterns below the data folder, as in recipes, or `hub:user/name`.
        out: Folder to write: the rows that stay, under the same paths.
        model: Any Sentence-Transformers model, or `bm25`.
        options: What to compare, and how.
        **settings: Fields of `FilterOptions`, which replace those of `options`.

    Returns:
        The folder. `record.json` holds the options, and for each dataset how many pairs stay, with examples of dropped
        pairs.

    Raises:
        FileNotFoundError: If a dataset or the model does not exist.
        OSError: If another process writes to the folder, or its disk is full.
        ValueError: If a row or option is invalid, or the folder holds something else.
    """
    chosen = FilterOptions(**{**dict(options or ()), **settings})

    def process(location: Location[Any], work: Path, make_ranker: Callable[[PairTexts, Path], Ranker]) -> Any:
        dataset, kept = read_pairs(location), []
        for number, start in enumerate(range(0, len(dataset.rows), chosen.shard_size)):
            texts, part = dataset.texts.part(slice(start, start + chosen.shard_size)), work / str(number)
            confirm = partial(confirm_rows, texts, make_ranker(texts, part), chosen.nearest)
            kept.append(map_blocks(part, len(texts.anchors), confirm, dataset.name)["kept"])
        stays = np.concatenate(kept)
        dropped = np.flatnonzero(~stays)
        shown = sorted(np.random.default_rng(0).permutation(dropped)[:EXAMPLES].tolist())
        rows = (dataset.rows[row] for row in np.flatnonzero(stays).tolist())
        counts = {"rows": len(stays), "kept": int(stays.sum()), "dropped": len(dropped)}
        return rows, {**counts, "examples": [dataset.rows[row] for row in shown]}

    return run_datasets(datasets, out, str(model), chosen, {"command": "filter", **chosen.own()}, process)


def confirm_rows(texts: PairTexts, ranker: Ranker, nearest: int, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Confirm the rows whose positive is found, if fewer than `nearest` others score above it.

    Other positives of the same query do not count.
    """
    scored = score_rows(texts, ranker, rows)
    kept = [row.positive > ranker.floor and (row.others > row.positive).sum() < nearest for row in scored]
    return {"kept": np.array(kept, dtype=bool)}
