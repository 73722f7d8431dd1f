"""Scores on held-out texts of the training splits, to compare learning rates and recipes without the test splits."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.evaluation import BaseEvaluator
from sklearn.metrics import ndcg_score
from sklearn.metrics.pairwise import cosine_similarity

from mote.training.data import ValidationSet


class Validation(BaseEvaluator):
    """Mean score over the held-out texts of each dataset, then over each task's datasets, then over the tasks.

    - pairs: nDCG@10 of the anchor's positive among all held-out positives of the dataset;
    - labelled texts: how often the nearest other text has the same label;
    - scored pairs: Spearman's correlation of the similarity with the score.

    All are multiplied by 100. The similarity is the cosine, of sparse vectors their dot product.

    Args:
        sets: Held-out texts.
        encodings: Task of the model → arguments of `encode` for its texts (`prompt`, `task`).
        batch_size: Batch size of `encode`.
    """

    primary_metric = "validation_mean"

    def __init__(self, sets: list[ValidationSet], encodings: dict[str, dict[str, Any]], batch_size: int = 64) -> None:
        super().__init__()
        self.sets, self.encodings, self.batch_size = sets, encodings, batch_size

    def __call__(  # type: ignore[override]
        self,
        model: SentenceTransformer | SparseEncoder,
        output_path: str | None = None,
        epoch: float = -1,
        steps: int = -1,
    ) -> dict[str, float]:
        """Score a model.

        Returns:
            `validation_mean`, and `validation_<task>`, `validation_<task>/<dataset>` for each of them.
        """
        by_task: dict[str, dict[str, float]] = defaultdict(dict)
        for held_out in self.sets:
            score = 100 * getattr(self, f"_score_{held_out.row_type}")(model, held_out)
            if math.isfinite(score):  # scores that are all equal correlate with nothing
                by_task[held_out.task][held_out.name] = score
        scores = {task: float(np.mean(list(of_task.values()))) for task, of_task in by_task.items()}
        metrics = {"validation_mean": float(np.mean(list(scores.values())))} if scores else {}
        for task, score in scores.items():
            metrics[f"validation_{task}"] = score
            for name, value in by_task[task].items():  # `retrieval/arxiv` begins with its task
                path = name if name.startswith(f"{task}/") else f"{task}/{name}"
                metrics[f"validation_{path}"] = value
        return metrics

    def _score_pairs(self, model: SentenceTransformer | SparseEncoder, held_out: ValidationSet) -> float:
        positives = list(dict.fromkeys(held_out.rows["positive"]))
        column = {text: index for index, text in enumerate(positives)}
        anchors = self._embed(model, held_out.rows["anchor"], held_out.anchor)
        scores = _similarity(model, anchors, self._embed(model, positives, held_out.positive))
        right = np.zeros_like(scores)
        right[np.arange(len(scores)), [column[text] for text in held_out.rows["positive"]]] = 1
        return float(ndcg_score(right, scores, k=10)) if len(positives) > 1 else 1.0

    def _score_labelled(self, model: SentenceTransformer | SparseEncoder, held_out: ValidationSet) -> float:
        embeddings = self._embed(model, held_out.rows["text"], held_out.anchor)
        scores = _similarity(model, embeddings, embeddings)
        np.fill_diagonal(scores, -np.inf)
        labels = np.array(held_out.rows["label"])
        return float(np.mean(labels[scores.argmax(axis=1)] == labels))

    def _score_scored(self, model: SentenceTransformer | SparseEncoder, held_out: ValidationSet) -> float:
        anchors = self._embed(model, held_out.rows["anchor"], held_out.anchor)
        positives = self._embed(model, held_out.rows["positive"], held_out.positive)
        return float(spearmanr(model.similarity_pairwise(anchors, positives), held_out.rows["score"]).statistic)

    def _embed(self, model: SentenceTransformer | SparseEncoder, texts: Iterable[str], task: str) -> np.ndarray:
        arguments = {**self.encodings[task], "batch_size": self.batch_size, "show_progress_bar": False}
        if isinstance(model, SparseEncoder):
            return model.encode(list(texts), convert_to_sparse_tensor=False, **arguments).float().cpu().numpy()
        return np.asarray(model.encode(list(texts), **arguments))


def _similarity(model: Any, queries: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Compare each query with each document."""
    return queries @ documents.T if isinstance(model, SparseEncoder) else cosine_similarity(queries, documents)
