"""Hard negatives on planted sets whose right answer is known."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from mote.corpora.mining import confirm_rows, mine_rows
from mote.corpora.options import MineOptions
from mote.corpora.pairs import PairTexts, dense_ranker, sparse_ranker
from mote.data.ranking import Ranker, best, bm25_ranker

pytest.importorskip("bm25s")


def given(scores: list[list[float]]) -> Ranker:
    """Scores as given, [queries, documents]."""
    return Ranker(lambda rows: np.array(scores)[rows])


def pairs_of(anchors: list[str], positives: list[str], corpus: list[str] | None = None) -> PairTexts:
    return PairTexts.of(anchors, [[text] for text in positives], corpus or [])


def mined(texts: PairTexts, ranker: Ranker, rows: list[int] | None = None, **options: object) -> list[list[int]]:
    chosen = np.arange(len(texts.anchors)) if rows is None else np.array(rows)
    result = mine_rows(texts, ranker, MineOptions(**options), chosen)  # type: ignore[arg-type]
    return [[place for place in row if place >= 0] for row in result["documents"].tolist()]


def kept(texts: PairTexts, ranker: Ranker, nearest: int) -> list[bool]:
    return confirm_rows(texts, ranker, nearest, np.arange(len(texts.anchors)))["kept"].tolist()


def test_candidates_at_the_margin_are_refused() -> None:
    pairs = pairs_of(["q"], ["positive"], ["duplicate", "at the margin", "below", "far"])
    scorer = given([[0.8, 0.79, 0.76, 0.7599, 0.1]])
    assert mined(pairs, scorer, negatives=4) == [[3, 4]]  # below 0.95 x 0.8
    assert mined(pairs, scorer, negatives=4, relative_margin=None) == [[1, 2, 3, 4]]
    assert mined(pairs, scorer, negatives=4, relative_margin=None, absolute_margin=0.5) == [[4]]
    assert mined(pairs, scorer, negatives=1, skip=3) == [[4]]
    assert mined(pairs, scorer, negatives=1, depth=2) == [[]]  # two candidates were looked at
    assert mined(pairs, given([[-0.8, -0.81, -0.85, -0.9, -0.95]]), negatives=4) == [[2, 3, 4]]  # below -0.84


def test_known_positives_and_the_query_itself_are_no_negatives() -> None:
    anchors, positives = ["q", "Q ", "other"], ["one", "two", "three"]
    pairs = pairs_of(anchors, positives, ["Three", " one", "q", "four"])
    assert pairs.queries == ["q", "other"]
    assert pairs.documents == ["one", "two", "three", "q", "four"]  # repeats left out
    scorer = given([[0.5, 0.9, 0.3, 0.99, 0.2], [0.1, 0.2, 0.9, 0.3, 0.4]])
    assert mined(pairs, scorer, negatives=4) == [[2, 4], [2, 4], [4, 3, 1, 0]]


def test_random_ones_follow_the_seed_and_not_the_other_rows() -> None:
    generator = np.random.default_rng(0)
    pairs = pairs_of([f"q{i}" for i in range(6)], [f"d{i}" for i in range(6)], [f"e{i}" for i in range(50)])
    scorer = given(generator.random((6, 56)).tolist())
    settings = {"negatives": 3, "depth": 40, "relative_margin": None, "sampling": "random"}
    whole = mined(pairs, scorer, **settings)
    assert whole == [mined(pairs, scorer, [row], **settings)[0] for row in range(6)]
    assert whole != mined(pairs, scorer, **{**settings, "seed": 1})
    assert whole != mined(pairs, scorer, **{**settings, "sampling": "top"})


@pytest.mark.parametrize("scores", [64, 2**26])
def test_the_best_scores_in_one_piece_or_in_several(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mote.corpora.pairs.SCORES", scores)
    generator = np.random.default_rng(0)
    queries, documents = (generator.standard_normal((n, 16)) for n in (20, 200))
    documents[50] = documents[10]  # the same score: the first one first
    texts = pairs_of([f"q{i}" for i in range(20)], [f"d{i}" for i in range(20)], [f"e{i}" for i in range(180)])
    exact = queries @ documents.T
    exact[:, :20][np.eye(20, dtype=bool)] = -np.inf
    expected = np.argsort(-exact, axis=1, kind="stable")[:, :12].tolist()
    assert mined(texts, dense_ranker(queries, documents), negatives=12, relative_margin=None) == expected


@pytest.mark.parametrize("dense", [0, 8])
def test_sparse_and_hybrid_vectors_are_searched_exactly(dense: int) -> None:
    generator = np.random.default_rng(0)

    def drawn(rows: int) -> np.ndarray:
        sparse = generator.integers(0, 3, (rows, 50)) * (generator.random((rows, 50)) < 0.1)  # with many ties
        return np.hstack([sparse, generator.random((rows, dense))])

    queries, documents = drawn(70), drawn(300)
    ranker = sparse_ranker(csr_matrix(queries), csr_matrix(documents), vocabulary=50)
    assert ranker.scores(np.arange(70)) == pytest.approx(queries @ documents.T)
    assert ranker.scores(np.array([2, 0])) == pytest.approx(queries[[2, 0]] @ documents.T)
    assert ranker.floor == (-np.inf if dense else 0)


def test_a_pair_stays_if_its_positive_is_among_the_nearest() -> None:
    pairs = pairs_of(["a", "a", "b", "c"], ["a1", "a2", "b1", "c1"])
    ranker = given([[0.9, 0.5, 0.1, 0.2], [0.3, 0.3, 0.2, 0.4], [0.7, 0.2, 0.1, 0.7]])
    # The other positive of "a" does not count against its second one; three others score above that of "b".
    assert kept(pairs, ranker, 1) == [True, True, False, True]
    assert kept(pairs, ranker, 3) == [True, True, False, True]
    assert kept(pairs, ranker, 4) == [True, True, True, True]


def test_a_positive_that_is_not_found_is_not_confirmed() -> None:
    texts = ["bananas are yellow", "whales come up for air", "to be or not to be"]
    pairs = pairs_of(["what is it", "how do whales get air", "to be"], texts)
    assert kept(pairs, bm25_ranker(pairs.queries, pairs.documents), 1) == [False, True, False]
    vectors = [csr_matrix([[0.0, 1.0], [0.0, 1.0]]), csr_matrix([[0.0, 1.0], [1.0, 0.0]])]
    two = pairs_of(["a", "b"], ["a1", "b1"])
    assert [kept(two, sparse_ranker(*vectors, size), 2) for size in (2, 1)] == [[True, False], [True, True]]


def test_a_shard_knows_the_positives_of_a_query_in_other_shards() -> None:
    part = pairs_of(["Q", "R", "q"], ["A", "B", "b"]).part(slice(0, 2))
    assert (part.queries, part.documents, part.known) == (["Q", "R"], ["A", "B"], [{0, 1}, {1}])
    assert kept(part, given([[0.5, 0.9], [0.1, 0.2]]), 1) == [True, True]


def test_bm25() -> None:
    documents = ["whales come up for air", "the whale sings", "bread is baked", "air and water", "nothing here"]
    pairs = pairs_of(["how do whales get air", "whale song", "the"], documents[:3], documents[3:])
    ranker = bm25_ranker(pairs.queries, pairs.documents)
    scores = ranker.scores(np.array([0, 2]))
    assert best(scores[0], 2).tolist() == [0, 3]
    assert (scores[0] > 0).tolist() == [True, False, False, True, False]
    assert not scores[1].any()  # no word is left of the last query
    assert mined(pairs, ranker, negatives=3) == [[3], [], []]  # none without a word of the query
    assert bm25_ranker(["7", "the"], ["3", "and"]).scores(np.arange(2)).tolist() == [[0, 0], [0, 0]]
