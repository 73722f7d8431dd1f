"""Rows whose texts are in test sets, or near to texts of these (`mote filter --against`)."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mote.corpora.pairs import SCORES, PairTexts, read_all
from mote.data.ranking import Ranker, normalized
from mote.data.rows import Location

MakeRanker = Callable[[PairTexts, Path], Ranker]


def without_tests(
    location: Location[Any], work: Path, make_ranker: MakeRanker, tests: Mapping[str, str], threshold: float
) -> tuple[Iterable[dict[str, Any]], dict[str, Any]]:
    """Return the rows of a dataset that have no text of a test set, nor one near to it, and counts of the others.

    `tests` holds normalized texts, each with the name of its set. The texts of a row are anchor, positives and
    negatives. Two texts are near if the score of each for the other is at least a fraction of its score for itself: so
    a passage that only contains a question is not near to it. For embeddings, this fraction is their cosine.
    """
    rows, examples, _ = read_all(location)
    texts = [[*map(normalized, (one.anchor, *one.positives, *one.negatives))] for one in examples]
    others = sorted({text for own in texts for text in own} - tests.keys())
    near_to = partial(near_pairs, make_ranker=make_ranker, threshold=threshold)
    near = near_to(others, [*tests], work=work / "near")
    if near:
        back = near_to(sorted({test for _, test in near}), sorted({text for text, _ in near}), work=work / "back")
        near = {(text, test) for text, test in near if (test, text) in back}
    names = {text: tests[test] for text, test in sorted(near)}
    kept, same, found = [], 0, Counter[str]()
    for row, own in zip(rows, texts, strict=True):
        equal = {tests[text] for text in own if text in tests}
        sets = equal | {names[text] for text in own if text in names}
        same += bool(equal)
        found.update(sets)
        if not sets:
            kept.append(row)
    dropped = len(rows) - len(kept)
    counts = {"rows": len(rows), "kept": len(kept), "dropped": dropped, "equal": same, "near": dropped - same}
    return kept, {**counts, "test_sets": dict(sorted(found.items()))}


def near_pairs(
    queries: Sequence[str], documents: Sequence[str], make_ranker: MakeRanker, work: Path, threshold: float
) -> set[tuple[str, str]]:
    """Find queries and documents whose score is at least a fraction of the document's score for itself."""
    count, found = len(documents), set[tuple[str, str]]()
    ranker = make_ranker(PairTexts([*documents, *queries], [*documents], np.array([]), [], []), work)

    def scored(first: int, last: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        step = max(1, SCORES // count)
        for start in range(first, last, step):
            rows = np.arange(start, min(start + step, last))
            yield rows, ranker.scores(rows)

    own = np.concatenate([scores[np.arange(len(rows)), rows] for rows, scores in scored(0, count)])
    for rows, scores in scored(count, count + len(queries)):
        for place, document in np.argwhere((scores >= threshold * own) & (scores > ranker.floor)).tolist():
            found.add((queries[rows[place] - count], documents[document]))
    return found
