"""What a teacher finds near a query: hard negatives (`mote mine`), and whether pairs are right (`mote filter`).

Near-duplicates of the positive answer the query as well, so a negative must score clearly below the positive
("positive-aware" mining, Moreira et al., "NV-Retriever", arXiv:2407.15831; Nussbaum and Duderstadt, arXiv:2502.07972,
Equation 5). A pair stays if its document is among the two nearest to its query, within shards of a million pairs
(consistency filtering, ibid., section 4.2, after Wang et al., arXiv:2212.03533, section 3.1).
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mote.checkpoints.hashing import folder_hash
from mote.corpora.embed import read_texts
from mote.corpora.options import EmbedOptions, FilterOptions, MineOptions
from mote.corpora.overlap import without_tests
from mote.corpora.pairs import PairDataset, PairTexts, read_pairs, score_rows
from mote.corpora.runs import map_blocks, run_datasets
from mote.data.ranking import Ranker, best
from mote.data.rows import Location
from mote.data.test_sets import texts_of_tests
from mote.hub import commit_of


def mine_negatives(
    datasets: Sequence[str], out: str | Path, model: str | Path, options: MineOptions | None = None, **settings: Any
) -> Path:
    """Copy datasets of pairs, adding mined negatives in the columns `negative_1`, `negative_2` and so on.

    With a cross-encoder, the column `scores` has its scores of the row's positives, then of its negatives.
    The same call resumes an interrupted run. Each dataset is mined separately, with its texts and embeddings in memory.

    Args:
        datasets: Paths and patterns below the data folder, as in recipes, or `hub:user/name`.
        out: Folder to write: the same rows, under the same paths, for recipes to read.
        model: The teacher, which scores documents for queries: any Sentence-Transformers model, or `bm25`. Scores of
            sparse and hybrid models are dot products, scores of others cosines.
        options: What to mine, and how.
        **settings: Fields of `MineOptions`, which replace those of `options`.

    Returns:
        The folder. `record.json` holds the options, and statistics of each dataset.

    Raises:
        FileNotFoundError: If a dataset, a file or the model does not exist.
        OSError: If another process writes to the folder, or its disk is full.
        ValueError: If a row or option is invalid, or the folder holds something else.
    """
    chosen = MineOptions(**{**dict(options or ()), **settings})
    texts = read_texts(chosen.corpus, EmbedOptions(split=chosen.split)) if chosen.corpus else ()
    corpus = [text.text for text in texts]
    identity = {"command": "mine", **chosen.own(), "corpus": hashlib.sha256(json.dumps(corpus).encode()).hexdigest()}
    commit = commit_of(chosen.scores) if chosen.scores else None
    identity["scores"] = chosen.scores and (commit or folder_hash(Path(chosen.scores)))

    @cache
    def cross_encoder() -> Any:
        from sentence_transformers import CrossEncoder

        settings: Any = {"max_length": chosen.max_length, "model_kwargs": {"dtype": chosen.model_dtype or "auto"}}
        return CrossEncoder(chosen.scores, revision=commit, trust_remote_code=chosen.trust_remote_code, **settings)

    def process(location: Location[Any], work: Path, make_ranker: Callable[[PairTexts, Path], Ranker]) -> Any:
        dataset = read_pairs(location, corpus)
        if dataset.has_negatives:
            raise ValueError(f"{location.name} already has negatives, and no others can be added")
        mine = partial(mine_rows, dataset.texts, make_ranker(dataset.texts, work), chosen)
        mined = map_blocks(work, len(dataset.rows), mine, location.name)
        scores = None
        if chosen.scores:
            score = partial(_cross_scores, dataset.texts, mined["documents"], cross_encoder, chosen)
            scores = map_blocks(work / "scores", len(dataset.rows), score, location.name)["scores"]
        return _with_negatives(dataset, mined["documents"], scores), _statistics(mined)

    return run_datasets(datasets, out, str(model), chosen, identity, process)


def mine_rows(texts: PairTexts, ranker: Ranker, options: MineOptions, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Mine negatives for some rows of a dataset. A row does not depend on the others."""
    count = options.negatives
    mined = {
        "documents": np.full((len(rows), count), -1),  # index of each negative; -1 where fewer were accepted
        "scores": np.full((len(rows), count), np.nan),
        "positive_scores": np.zeros(len(rows)),
        "too_near": np.zeros(len(rows), dtype=np.int64),  # candidates that a margin excluded
    }
    for index, scored in enumerate(score_rows(texts, ranker, rows)):
        candidates = best(scored.others, options.depth)[options.skip :]
        candidates = candidates[scored.others[candidates] > ranker.floor]
        accepted = candidates[scored.others[candidates] < _limit(options, scored.positive)]
        mined["positive_scores"][index] = scored.positive
        mined["too_near"][index] = len(candidates) - len(accepted)
        if options.sampling == "random":
            generator = np.random.default_rng((options.seed, scored.row))
            accepted = accepted[np.sort(generator.permutation(len(accepted))[:count])]
        accepted = accepted[:count]
        mined["documents"][index, : len(accepted)] = accepted
        mined["scores"][index, : len(accepted)] = scored.others[accepted]
    return mined


def _limit(options: MineOptions, positive: float) -> float:
    """Return the score that negatives must stay below; infinite without a margin."""
    limit = np.inf
    if options.relative_margin is not None and options.relative_margin >= 0:
        limit = positive - options.relative_margin * abs(positive)
    if options.absolute_margin is not None:
        limit = min(limit, positive - options.absolute_margin)
    return limit


def _cross_scores(
    texts: PairTexts, mined: np.ndarray, cross_encoder: Callable[[], Any], options: MineOptions, rows: np.ndarray
) -> dict[str, np.ndarray]:
    """Score the positives, then the mined negatives [R, N] of one row after another."""
    pairs = [
        (texts.queries[texts.anchors[row]], texts.documents[place])
        for row in rows.tolist()
        for place in (*texts.positives[row], *mined[row].tolist())
        if place >= 0
    ]
    settings: dict[str, Any] = {"batch_size": options.batch_size, "device": options.device}
    return {"scores": cross_encoder().predict(pairs, show_progress_bar=False, **settings).reshape(len(pairs))}


def _with_negatives(dataset: PairDataset, documents: np.ndarray, scores: np.ndarray | None) -> Iterator[dict[str, Any]]:
    left = iter(() if scores is None else scores.tolist())
    for row, positives, places in zip(dataset.rows, dataset.texts.positives, documents.tolist(), strict=True):
        negatives = [dataset.texts.documents[place] for place in places if place >= 0]
        own = {} if scores is None else {"scores": [*islice(left, len(positives) + len(negatives))]}
        yield {**row, **{f"negative_{number}": text for number, text in enumerate(negatives, start=1)}, **own}


def _statistics(mined: dict[str, np.ndarray]) -> dict[str, Any]:
    exists = mined["documents"] >= 0
    found, scores = exists.sum(axis=1), mined["scores"][exists]
    return {
        "rows": len(found),
        "with_all_negatives": int((found == exists.shape[1]).sum()),
        "without_negatives": int((found == 0).sum()),
        "negatives": int(found.sum()),
        "too_near": int(mined["too_near"].sum()),
        "mean_positive_score": round(float(mined["positive_scores"].mean()), 4),
        "mean_negative_score": round(float(scores.mean()), 4) if len(scores) else None,
    }


def filter_pairs(
    datasets: Sequence[str], out: str | Path, model: str | Path, options: FilterOptions | None = None, **settings: Any
) -> Path:
    """Copy datasets of pairs, without pairs whose positive a model does not retrieve.

    With `against`, copy datasets of any rows, without those whose texts are in test sets, or near to texts of these.
    The same call resumes an interrupted run. Errors are those of `mine_negatives`.

    Args:
        datasets: Paths and patterns below the data folder, as in recipes, or `hub:user/name`.
        out: Folder to write: the rows that stay, under the same paths.
        model: Any Sentence-Transformers model, or `bm25`.
        options: What to compare, and how.
        **settings: Fields of `FilterOptions`, which replace those of `options`.

    Returns:
        The folder. `record.json` holds the options, and for each dataset how many pairs stay.
    """
    chosen = FilterOptions(**{**dict(options or ()), **settings})
    identity, tests = {"command": "filter", **chosen.own()}, dict[str, str]()
    if chosen.against is not None:
        tests = texts_of_tests(chosen.against)
        identity["against"] = hashlib.sha256(json.dumps(tests).encode()).hexdigest()
        chosen = chosen.updated(document_task=chosen.query_task)  # texts of one kind

    def process(location: Location[Any], work: Path, make_ranker: Callable[[PairTexts, Path], Ranker]) -> Any:
        if chosen.against is not None:
            return without_tests(location, work, make_ranker, tests, chosen.threshold)
        dataset, kept = read_pairs(location), []
        for number, start in enumerate(range(0, len(dataset.rows), chosen.shard_size)):
            texts, part = dataset.texts.part(slice(start, start + chosen.shard_size)), work / str(number)
            confirm = partial(confirm_rows, texts, make_ranker(texts, part), chosen.nearest)
            kept.append(map_blocks(part, len(texts.anchors), confirm, location.name)["kept"])
        stays = np.flatnonzero(np.concatenate(kept)).tolist()
        counts = {"rows": len(dataset.rows), "kept": len(stays), "dropped": len(dataset.rows) - len(stays)}
        return (dataset.rows[row] for row in stays), counts

    return run_datasets(datasets, out, str(model), chosen, identity, process)


def confirm_rows(texts: PairTexts, ranker: Ranker, nearest: int, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Confirm the rows whose positive is found, if fewer than `nearest` others score above it.

    Other positives of the same query do not count.
    """
    scored = score_rows(texts, ranker, rows)
    kept = [row.positive > ranker.floor and (row.others > row.positive).sum() < nearest for row in scored]
    return {"kept": np.array(kept, dtype=bool)}
