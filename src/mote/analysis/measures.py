"""What is measured on embeddings: similarity between tasks, divergence of queries and documents, t-SNE.

Similarity is that of Figures 1 and 3 of the MoTE paper; divergence and t-SNE are measures of the CoT-MoTE paper.
"""

from collections.abc import Mapping
from itertools import combinations
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator
from scipy.special import rel_entr, softmax

# How arrays are written to JSON and read again.
Array = Annotated[NDArray[np.float64], PlainValidator(np.asarray), PlainSerializer(np.ndarray.tolist)]
Samples = dict[str, Array]
"""Name of a measure, such as "classification / clustering" → its value for each text or pair."""

ALL_PAIRS = "all pairs"


def cosines(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute the cosine similarity row by row, [N, H] and [N, H] to [N]; of equal rows it is exactly 1."""
    lengths = np.sqrt((first * first).sum(axis=1) * (second * second).sum(axis=1))
    return (first * second).sum(axis=1) / np.where(lengths > 0, lengths, 1.0)


def similarity_of(embeddings: Mapping[str, NDArray[np.float64]]) -> Samples:
    """Compare the embeddings [N, H] of the same texts under several tasks; empty if there are no tasks.

    For each pair of tasks this is the cosine of the two embeddings of each text, [N]; and the mean over the pairs.
    """
    pairs = {f"{a} / {b}": cosines(embeddings[a], embeddings[b]) for a, b in combinations(embeddings, 2)}
    return {**pairs, ALL_PAIRS: np.mean(list(pairs.values()), axis=0)} if pairs else {}


def as_distributions(embeddings: NDArray[np.float64]) -> NDArray[np.float64]:
    """Turn embeddings [N, H] into distributions over the H dimensions: softmax(√H · e / ‖e‖).

    The scale makes the mean square of each embedding's components 1, so that models of different widths, normalised
    or not, can be compared; the softmax of a plain unit vector is nearly uniform.
    """
    return softmax(_normalized(embeddings) * np.sqrt(embeddings.shape[1]), axis=1)


def neighbor_distributions(
    queries: NDArray[np.float64], documents: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Turn distances into distributions, as in appendix A.1 of the CoT-MoTE paper: exp(-d) / Σ exp(-d), d = 1 - cosine.

    Each query is a distribution over the documents, each document one over the queries: the first is computed from the
    matrix of all distances, the second from its transpose, [N, N] each. If queries and documents coincide, the two are
    equal.
    """
    first, second = _normalized(queries), _normalized(documents)
    distances = 1 - first @ second.T  # [N, N]
    return softmax(-distances, axis=1), softmax(-distances.T, axis=1)


def _normalized(embeddings: NDArray[np.float64]) -> NDArray[np.float64]:
    lengths = np.linalg.norm(embeddings, axis=1, keepdims=True)
    return embeddings / np.where(lengths > 0, lengths, 1.0)


def kl_divergence(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Σ p ln(p / q) over the last axis, in nats."""
    return rel_entr(p, q).sum(axis=-1)


def js_divergence(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """½ KL(p ‖ m) + ½ KL(q ‖ m) with m = ½ (p + q), in nats: symmetric, and at most ln 2.

    The square of `scipy.spatial.distance.jensenshannon`, whose root is NaN where rounding makes it negative.
    """
    middle = (p + q) / 2
    return (kl_divergence(p, middle) + kl_divergence(q, middle)) / 2


def divergence_of(queries: NDArray[np.float64], documents: NDArray[np.float64]) -> Samples:
    """Measure the divergence between queries and their documents, [N, H] each, in nats, and the cosine: [N] each.

    Distributions are those of `as_distributions`; for "neighbors KL" and "neighbors JS", of `neighbor_distributions`.
    """
    p, q = as_distributions(queries), as_distributions(documents)
    of_queries, of_documents = neighbor_distributions(queries, documents)
    return {
        "KL(query ‖ document)": kl_divergence(p, q),
        "KL(document ‖ query)": kl_divergence(q, p),
        "JS": js_divergence(p, q),
        "cosine": cosines(queries, documents),
        "neighbors KL": kl_divergence(of_queries, of_documents),
        "neighbors JS": js_divergence(of_queries, of_documents),
    }


def tsne(queries: NDArray[np.float64], documents: NDArray[np.float64], seed: int = 0) -> NDArray[np.float64]:
    """Project embeddings, [N, H] each, onto a plane by t-SNE over cosine distances: [2 N, 2], the queries first."""
    from sklearn.manifold import TSNE

    points = np.concatenate([queries, documents])
    perplexity = min(30.0, (len(points) - 1) / 3)
    layout = TSNE(metric="cosine", init="pca", perplexity=perplexity, random_state=seed)
    return np.asarray(layout.fit_transform(points.astype(np.float32)), dtype=np.float64)
