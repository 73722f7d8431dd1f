"""Hard negatives on planted sets whose right answer is known."""

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from mote.corpora.filtering import consistent
from mote.corpora.mining import MiningSettings, judge, mine
from mote.corpora.pairs import Pairs
from mote.corpora.scorers import BM25Scorer, EmbeddingScorer, Scorer, SparseScorer, nearest_unknown

faiss = pytest.importorskip("faiss")


class Given:
    """Scores as given, [queries, documents]."""

    floor = -np.inf

    def __init__(self, scores: list[list[float]]) -> None:
        self.scores = np.array(scores)

    def nearest(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(-self.scores[queries], axis=1, kind="stable")[:, :count]
        return order, np.take_along_axis(self.scores[queries], order, axis=1)

    def score(self, queries: np.ndarray, documents: np.ndarray) -> np.ndarray:
        return self.scores[queries, documents]


def mined(pairs: Pairs, scorer: Scorer, rows: list[int] | None = None, **settings: object) -> list[list[int]]:
    chosen = np.arange(len(pairs.anchors)) if rows is None else np.array(rows)
    result = mine(pairs, scorer, MiningSettings(**settings), chosen)  # type: ignore[arg-type]
    return [[place for place in row if place >= 0] for row in result.documents.tolist()]


def test_candidates_at_the_margin_are_refused() -> None:
    pairs = Pairs.of(["q"], ["positive"], ["duplicate", "at the margin", "below", "far"])
    scorer = Given([[0.8, 0.79, 0.76, 0.7599, 0.1]])
    assert mined(pairs, scorer, negatives=4) == [[3, 4]]  # below 0.95 x 0.8
    assert mined(pairs, scorer, negatives=4, relative_margin=None) == [[1, 2, 3, 4]]
    assert mined(pairs, scorer, negatives=4, relative_margin=None, absolute_margin=0.5) == [[4]]
    assert mined(pairs, scorer, negatives=1, skip=3) == [[4]]
    assert mined(pairs, scorer, negatives=1, depth=2) == [[]]  # two candidates were looked at
    assert mined(pairs, Given([[-0.8, -0.81, -0.85, -0.9, -0.95]]), negatives=4) == [[2, 3, 4]]  # below -0.84


def test_known_positives_and_the_query_itself_are_no_negatives() -> None:
    anchors, positives = ["q", "Q ", "other"], ["one", "two", "three"]
    pairs = Pairs.of(anchors, positives, ["Three", " one", "q", "four"])
    assert pairs.queries == ["q", "other"]
    assert pairs.documents == ["one", "two", "three", "q", "four"]  # repeats left out
    scorer = Given([[0.5, 0.9, 0.3, 0.99, 0.2], [0.1, 0.2, 0.9, 0.3, 0.4]])
    assert mined(pairs, scorer, negatives=4) == [[2, 4], [2, 4], [4, 3, 1, 0]]


def test_random_ones_follow_the_seed_and_not_the_other_rows() -> None:
    generator = np.random.default_rng(0)
    pairs = Pairs.of([f"q{i}" for i in range(6)], [f"d{i}" for i in range(6)], [f"e{i}" for i in range(50)])
    scorer = Given(generator.random((6, 56)).tolist())
    settings = {"negatives": 3, "depth": 40, "relative_margin": None, "sampling": "random"}
    whole = mined(pairs, scorer, **settings)
    assert whole == [mined(pairs, scorer, [row], **settings)[0] for row in range(6)]
    assert whole != mined(pairs, scorer, **{**settings, "seed": 1})
    assert whole != mined(pairs, scorer, **{**settings, "sampling": "top"})


@pytest.mark.parametrize("shard", [7, 1000])
def test_embeddings_are_searched_exactly_in_one_piece_or_in_several(shard: int) -> None:
    generator = np.random.default_rng(0)
    queries, documents = (generator.standard_normal((n, 16)).astype(np.float32) for n in (20, 200))
    documents[50] = documents[10]  # the same score: the first one first
    scorer = EmbeddingScorer(queries, documents, shard)
    places, scores = scorer.nearest(np.arange(20), 12)
    exact = queries.astype(np.float64) @ documents.astype(np.float64).T
    expected = np.argsort(-exact, axis=1, kind="stable")[:, :12]
    assert (places == expected).all()
    assert np.allclose(scores, np.take_along_axis(exact, expected, axis=1), atol=1e-12)


@pytest.mark.parametrize("shard", [7, 1000])
@pytest.mark.parametrize("noise", [0.0, 1e-7])
def test_scores_that_float32_cannot_tell_apart(noise: float, shard: int) -> None:
    generator = np.random.default_rng(0)
    documents = generator.standard_normal((400, 64))
    documents[100:350] = documents[100] + noise * generator.standard_normal((250, 64))  # more than are searched for
    queries, documents = documents[100:102].astype(np.float32), documents.astype(np.float32)
    places, _ = EmbeddingScorer(queries, documents, shard).nearest(np.arange(2), 9)
    exact = queries.astype(np.float64) @ documents.astype(np.float64).T
    assert (places == np.argsort(-exact, axis=1, kind="stable")[:, :9]).all()


@pytest.mark.parametrize("dense", [0, 8])
def test_sparse_and_hybrid_vectors_are_searched_exactly(dense: int) -> None:
    generator = np.random.default_rng(0)

    def drawn(rows: int) -> np.ndarray:
        sparse = generator.integers(0, 3, (rows, 50)) * (generator.random((rows, 50)) < 0.1)  # with many ties
        return np.hstack([sparse, generator.random((rows, dense))])

    queries, documents = drawn(70), drawn(300)
    scorer = SparseScorer(csr_matrix(queries), csr_matrix(documents), vocabulary=50)
    exact = queries @ documents.T
    for count in (5, 300):
        places, scores = scorer.nearest(np.arange(70), count)
        for row in range(70):
            order = [place for place in np.argsort(-exact[row], kind="stable") if dense or exact[row, place] > 0]
            assert places[row].tolist() == (order[:count] + [-1] * count)[:count]
            assert scores[row, : len(order)] == pytest.approx(exact[row, order[:count]])
    assert scorer.score(np.array([2, 0, 2]), np.array([1, 0, 4])) == pytest.approx(exact[[2, 0, 2], [1, 0, 4]])


def test_a_query_with_many_known_documents_does_not_widen_the_search_of_others() -> None:
    pairs = Pairs.of(["a"] * 50 + ["b"], [f"d{i}" for i in range(51)], ["e", "f"])
    asked: list[tuple[list[int], int]] = []

    class Recording(Given):
        def nearest(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
            asked.append((queries.tolist(), count))
            return super().nearest(queries, count)

    scorer = Recording(np.random.default_rng(0).random((2, 53)).tolist())
    found = [places.tolist() for places, _ in nearest_unknown(pairs, scorer, np.array([50, 0]), 3)]
    ranked = np.argsort(-scorer.scores, axis=1, kind="stable").tolist()
    assert found == [[place for place in ranked[1] if place != 50][:3], [place for place in ranked[0] if place >= 50]]
    assert asked == [([1], 5), ([0], 53)]


def test_judging_drops_repeats_and_known_positives() -> None:
    pairs = Pairs.of(["q", "r"], ["one", "two"], negatives=[["far", "near", "FAR ", "One"], []])
    scorer = Given([[0.8, 0.1, 0.2, 0.79], [0.1, 0.9, 0.2, 0.3]])
    judged = judge(pairs, scorer, MiningSettings(), np.arange(2))
    assert judged.documents.tolist() == [[2, -1, -1, -1], [-1, -1, -1, -1]]
    assert judged.too_near.tolist() == [1, 0]
    assert judged.scores[0, 0] == 0.2


def test_a_random_corpus_gives_the_nearest_allowed_documents() -> None:
    generator = np.random.default_rng(1)
    documents = generator.standard_normal((300, 32))
    queries = documents[:40] + 0.3 * generator.standard_normal((40, 32))
    documents[100:140] = documents[:40] + 0.01 * generator.standard_normal((40, 32))  # near-duplicates of positives
    vectors = [(one / np.linalg.norm(one, axis=1, keepdims=True)).astype(np.float32) for one in (queries, documents)]
    texts = [f"d{i}" for i in range(300)]
    pairs = Pairs.of([f"q{i}" for i in range(40)], texts[:40], texts[40:])
    result = mined(pairs, EmbeddingScorer(*vectors), negatives=5, depth=50)
    scores = vectors[0].astype(np.float64) @ vectors[1].astype(np.float64).T
    for row in range(40):
        ranked = np.argsort(-scores[row], kind="stable")
        allowed = [place for place in ranked if scores[row, place] < 0.95 * scores[row, row]]
        assert result[row] == allowed[:5]
        assert 100 + row not in result[row]


def test_a_pair_stays_if_its_positive_is_among_the_nearest() -> None:
    pairs = Pairs.of(["a", "a", "b", "c"], ["a1", "a2", "b1", "c1"])
    scorer = Given([[0.9, 0.5, 0.1, 0.2], [0.3, 0.3, 0.2, 0.4], [0.7, 0.2, 0.1, 0.7]])
    stays = [consistent(pairs, scorer, nearest, np.arange(4)).tolist() for nearest in (1, 3, 4)]
    # The other positive of "a" does not count against its second one; three others score above that of "b".
    assert stays == [[True, True, False, True], [True, True, False, True], [True, True, True, True]]


def test_a_positive_that_is_not_found_is_not_confirmed() -> None:
    pytest.importorskip("bm25s")
    texts = ["bananas are yellow", "whales come up for air", "to be or not to be"]
    pairs = Pairs.of(["what is it", "how do whales get air", "to be"], texts)
    scorer = BM25Scorer(pairs.queries, pairs.documents)
    assert consistent(pairs, scorer, 1, np.arange(3)).tolist() == [False, True, False]
    vectors = [np.array([[0.0, 1.0], [0.0, 1.0]]), np.array([[0.0, 1.0], [1.0, 0.0]])]
    two = Pairs.of(["a", "b"], ["a1", "b1"])
    sparse = [SparseScorer(csr_matrix(vectors[0]), csr_matrix(vectors[1]), size) for size in (2, 1)]
    assert [consistent(two, one, 2, np.arange(2)).tolist() for one in sparse] == [[True, False], [True, True]]


def test_bm25_of_documents_without_words() -> None:
    pytest.importorskip("bm25s")
    scorer = BM25Scorer(["7", "the"], ["3", "and"])
    assert scorer.nearest(np.array([0, 1]), 1)[0].tolist() == [[-1], [-1]]
    assert scorer.score(np.array([0]), np.array([1])).tolist() == [0.0]


def test_a_shard_knows_the_positives_of_a_query_in_other_shards() -> None:
    pairs = Pairs.of(["Q", "R", "q"], ["A", "B", "b"])
    part = pairs.part(slice(0, 2))
    assert (part.queries, part.documents, part.known) == (["Q", "R"], ["A", "B"], [{0, 1}, {1}])
    assert consistent(part, Given([[0.5, 0.9], [0.1, 0.2]]), 1, np.arange(2)).tolist() == [True, True]


def test_bm25() -> None:
    pytest.importorskip("bm25s")
    documents = ["whales come up for air", "the whale sings", "bread is baked", "air and water", "nothing here"]
    pairs = Pairs.of(["how do whales get air", "whale song", "the"], documents[:3], documents[3:])
    scorer = BM25Scorer(pairs.queries, pairs.documents)
    places, scores = scorer.nearest(np.array([0, 2]), 5)
    assert places.tolist() == [[0, 3, -1, -1, -1], [-1] * 5]  # no word is left of the last query
    assert scores[1].tolist() == [-np.inf] * 5
    assert scorer.score(np.array([1, 0]), np.array([0, 0])).tolist() == [0.0, scores[0, 0]]
    assert mined(pairs, scorer, negatives=3) == [[3], [], []]  # none without a word of the query


def test_bm25_ranks_equal_scores_by_place() -> None:
    pytest.importorskip("bm25s")
    generator = np.random.default_rng(0)
    words = np.array([f"word{i}" for i in range(12)])
    documents = [" ".join(generator.choice(words, 3)) for _ in range(300)]
    scorer = BM25Scorer([" ".join(words[:3])], documents)
    exact = scorer.score(np.zeros(300, dtype=int), np.arange(300))
    assert len(np.unique(exact)) < 60
    found = [place for place in np.argsort(-exact, kind="stable").tolist() if exact[place] > 0]
    for count in (1, 10, 50, 300):
        wanted = found[:count]
        assert scorer.nearest(np.array([0]), count)[0][0].tolist() == wanted + [-1] * (count - len(wanted))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"negatives": 0}, "negatives must be at least 1, got 0"),
        ({"skip": 100}, r"skip must be from 0 to below depth \(100\), got 100"),
        ({"skip": 98}, "5 negatives cannot be found in 2 candidates: raise depth"),
        ({"relative_margin": -0.1}, "relative_margin must be 0 or more, got -0.1"),
        ({"absolute_margin": float("nan")}, "absolute_margin must be 0 or more, got nan"),
        ({"sampling": "best"}, "sampling must be 'top' or 'random', got 'best'"),
    ],
)
def test_settings_out_of_range(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MiningSettings(**settings)
