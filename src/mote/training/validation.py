"""Scores on held-out texts of the training splits, to compare learning rates and recipes without the test splits."""

import math
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.evaluation import BaseEvaluator
from sklearn.metrics import ndcg_score
from sklearn.metrics.pairwise import cosine_similarity

from mote.training.cleaning import DatasetRows

Encoder = SentenceTransformer | SparseEncoder


class Validation(BaseEvaluator):
    """Mean score over the held-out texts of each dataset, then over each task's datasets, then over the tasks.

    - pairs: nDCG@10 of the anchor's positives among all held-out positives of the dataset;
    - labelled texts: how often the nearest other text has the same label;
    - scored pairs: Spearman correlation of the similarity with the score.

    All are multiplied by 100. The similarity is the cosine, or the dot product of sparse vectors. `encodings` are
    arguments of `encode` (`prompt`, `task`) for the texts of each task of the model.
    """

    primary_metric = "validation_mean"

    def __init__(self, sets: list[DatasetRows], encodings: dict[str, dict[str, Any]], batch_size: int = 64) -> None:
        super().__init__()
        self.sets, self.encodings, self.batch_size = sets, encodings, batch_size

    def __call__(self, model: Encoder, *_: Any, **__: Any) -> dict[str, float]:  # type: ignore[override]
        """Return `validation_mean`, and `validation_TASK` and `validation_TASK/DATASET` for each task and dataset."""
        by_task: dict[str, dict[str, float]] = defaultdict(dict)
        for dataset in self.sets:
            score = 100 * getattr(self, f"_score_{dataset.row_type}")(model, dataset)
            # If all scores are equal, there is no correlation.
            if math.isfinite(score):
                by_task[dataset.task_name][dataset.name] = score
        scores = {task: float(np.mean(list(of_task.values()))) for task, of_task in by_task.items()}
        metrics = {"validation_mean": float(np.mean(list(scores.values())))} if scores else {}
        for task, score in scores.items():
            metrics[f"validation_{task}"] = score
            for name, value in by_task[task].items():
                metrics[f"validation_{task}/{name.removeprefix(f'{task}/')}"] = value  # `retrieval/arxiv`, for example
        return metrics

    def _score_pairs(self, model: Encoder, dataset: DatasetRows) -> float:
        anchors = np.array([row.anchor.strip() for row in dataset.held_out])
        own = np.array([row.positives[0] for row in dataset.held_out])
        positives = list(dict.fromkeys(own.tolist()))
        # An anchor may have several rows, with a positive each: all of them are right in each row.
        # In float32, as NumPy multiplies matrices of other types slowly.
        same, theirs = anchors[:, None] == anchors, own[:, None] == np.array(positives)
        right = same.astype(np.float32) @ theirs.astype(np.float32) > 0  # [N, P]
        embedded = self._embed(model, positives, dataset, dataset.tasks[1])
        scores = _similarity(model, self._anchors(model, dataset), embedded)
        return float(ndcg_score(right.astype(int), scores, k=10)) if len(positives) > 1 else 1.0

    def _score_labelled(self, model: Encoder, dataset: DatasetRows) -> float:
        embeddings = self._anchors(model, dataset)
        scores = _similarity(model, embeddings, embeddings)
        np.fill_diagonal(scores, -np.inf)
        labels = np.array([row.label for row in dataset.held_out])
        return float(np.mean(labels[scores.argmax(axis=1)] == labels))

    def _score_scored(self, model: Encoder, dataset: DatasetRows) -> float:
        positives = [row.positives[0] for row in dataset.held_out]
        embedded = self._embed(model, positives, dataset, dataset.tasks[1])
        similarities = model.similarity_pairwise(self._anchors(model, dataset), embedded)
        return float(spearmanr(similarities, [row.label for row in dataset.held_out]).statistic)

    def _anchors(self, model: Encoder, dataset: DatasetRows) -> np.ndarray:
        return self._embed(model, [row.anchor for row in dataset.held_out], dataset, dataset.tasks[0])

    def _embed(self, model: Encoder, texts: list[str], dataset: DatasetRows, task: str) -> np.ndarray:
        arguments = {**self.encodings[task], "batch_size": self.batch_size, "show_progress_bar": False}
        if dataset.instruction is not None and task == dataset.tasks[0]:
            arguments["prompt"] = dataset.instruction
        mixed = len({weight.dtype for weight in model.parameters()}) > 1  # of frozen weights in bfloat16
        with torch.autocast(model.device.type, torch.bfloat16, enabled=mixed):
            if isinstance(model, SparseEncoder):
                return model.encode(texts, convert_to_sparse_tensor=False, **arguments).float().cpu().numpy()
            return np.asarray(model.encode(texts, **arguments))


def _similarity(model: Encoder, queries: np.ndarray, documents: np.ndarray) -> np.ndarray:
    return queries @ documents.T if isinstance(model, SparseEncoder) else cosine_similarity(queries, documents)
