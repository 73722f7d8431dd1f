"""Scores on held-out texts of the training splits, to compare learning rates and recipes without the test splits."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.evaluation import BaseEvaluator
from sklearn.metrics import ndcg_score
from sklearn.metrics.pairwise import cosine_similarity

from mote.training.data import ValidationSet

Encoder = SentenceTransformer | SparseEncoder


class Validation(BaseEvaluator):
    """Mean score over the held-out texts of each dataset, then over each task's datasets, then over the tasks.

    - pairs: nDCG@10 of the anchor's positives among all held-out positives of the dataset;
    - labelled texts: how often the nearest other text has the same label;
    - scored pairs: Spearman correlation of the similarity with the score.

    All are multiplied by 100. The similarity is the cosine, or the dot product of sparse vectors.

    Args:
        sets: Held-out texts.
        encodings: Task of the model → arguments of `encode` for its texts (`prompt`, `task`).
        batch_size: Batch size of `encode`.
        mixed: Whether the model runs in mixed precision (bfloat16); needed if only some of its weights are bfloat16.
    """

    primary_metric = "validation_mean"

    def __init__(
        self,
        sets: list[ValidationSet],
        encodings: dict[str, dict[str, Any]],
        batch_size: int = 64,
        *,
        mixed: bool = False,
    ) -> None:
        super().__init__()
        self.sets, self.encodings, self.batch_size, self.mixed = sets, encodings, batch_size, mixed

    def __call__(self, model: Encoder, *_: Any, **__: Any) -> dict[str, float]:  # type: ignore[override]
        """Return `validation_mean`, and `validation_TASK` and `validation_TASK/DATASET` for each task and dataset."""
        by_task: dict[str, dict[str, float]] = defaultdict(dict)
        for held_out in self.sets:
            score = 100 * getattr(self, f"_score_{held_out.row_type}")(model, held_out)
            if math.isfinite(score):  # if all scores are equal, there is no correlation
                by_task[held_out.task][held_out.name] = score
        scores = {task: float(np.mean(list(of_task.values()))) for task, of_task in by_task.items()}
        metrics = {"validation_mean": float(np.mean(list(scores.values())))} if scores else {}
        for task, score in scores.items():
            metrics[f"validation_{task}"] = score
            for name, value in by_task[task].items():  # `retrieval/arxiv` begins with its task
                path = name if name.startswith(f"{task}/") else f"{task}/{name}"
                metrics[f"validation_{path}"] = value
        return metrics

    def _score_pairs(self, model: Encoder, held_out: ValidationSet) -> float:
        anchors, positives, right = self.embedded_pairs(model, held_out)
        return float(ndcg_score(right, _similarity(model, anchors, positives), k=10)) if len(positives) > 1 else 1.0

    def embedded_pairs(self, model: Encoder, held_out: ValidationSet) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Embed anchors [N, H] and positives, each once [P, H]; a matrix [N, P] has 1 for each anchor's positives.

        An anchor may have several rows, with a positive each: all of them are right in each row.
        """
        positives = list(dict.fromkeys(held_out.rows["positive"]))
        column = {text: index for index, text in enumerate(positives)}
        of_anchor: dict[str, list[int]] = defaultdict(list)
        for anchor, positive in zip(held_out.rows["anchor"], held_out.rows["positive"], strict=True):
            of_anchor[anchor.strip()].append(column[positive])
        anchors = self._embed(model, held_out.rows["anchor"], held_out, held_out.anchor)
        right = np.zeros((len(anchors), len(positives)))
        for row, anchor in enumerate(held_out.rows["anchor"]):
            right[row, of_anchor[anchor.strip()]] = 1
        return anchors, self._embed(model, positives, held_out, held_out.positive), right

    def _score_labelled(self, model: Encoder, held_out: ValidationSet) -> float:
        embeddings = self._embed(model, held_out.rows["text"], held_out, held_out.anchor)
        scores = _similarity(model, embeddings, embeddings)
        np.fill_diagonal(scores, -np.inf)
        labels = np.array(held_out.rows["label"])
        return float(np.mean(labels[scores.argmax(axis=1)] == labels))

    def _score_scored(self, model: Encoder, held_out: ValidationSet) -> float:
        anchors = self._embed(model, held_out.rows["anchor"], held_out, held_out.anchor)
        positives = self._embed(model, held_out.rows["positive"], held_out, held_out.positive)
        return float(spearmanr(model.similarity_pairwise(anchors, positives), held_out.rows["score"]).statistic)

    def _embed(self, model: Encoder, texts: Iterable[str], held_out: ValidationSet, task: str) -> np.ndarray:
        arguments = {**self.encodings[task], "batch_size": self.batch_size, "show_progress_bar": False}
        if held_out.instruction is not None and task == held_out.anchor:
            arguments["prompt"] = held_out.instruction
        with torch.autocast(model.device.type, torch.bfloat16, enabled=self.mixed):
            if isinstance(model, SparseEncoder):
                return model.encode(list(texts), convert_to_sparse_tensor=False, **arguments).float().cpu().numpy()
            return np.asarray(model.encode(list(texts), **arguments))


def _similarity(model: Encoder, queries: np.ndarray, documents: np.ndarray) -> np.ndarray:
    return queries @ documents.T if isinstance(model, SparseEncoder) else cosine_similarity(queries, documents)
