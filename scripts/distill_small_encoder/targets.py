"""Targets: the teacher's embeddings in fewer dimensions."""

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize

CHUNK = 50_000  # rows that are converted to float32 at once


def principal_directions(rows: np.ndarray, dimensions: int) -> tuple[np.ndarray, float]:
    """Find the directions that keep most of the rows' length (PCA without centring, since a cosine has no centre).

    Args:
        rows: (count, width).
        dimensions: Number of directions to keep.

    Returns:
        The directions, orthonormal rows of shape (dimensions, width), and the kept share of the squared length.
    """
    moment = np.zeros((rows.shape[1], rows.shape[1]))
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK].astype(np.float32)
        moment += chunk.T @ chunk
    values, vectors = np.linalg.eigh(moment)
    return vectors[:, ::-1][:, :dimensions].T.astype(np.float32), float(values[-dimensions:].sum() / values.sum())


def reduce_rows(embeddings: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """Project embeddings on the directions and give them length 1 again: (texts, dimensions), float32."""
    reduced = np.empty((len(embeddings), len(directions)), dtype=np.float32)
    for start in range(0, len(embeddings), CHUNK):
        rows = embeddings[start : start + CHUNK].astype(np.float32) @ directions.T
        reduced[start : start + len(rows)] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return reduced


def reduced_teacher(teacher: SentenceTransformer, directions: np.ndarray) -> SentenceTransformer:
    """Build the teacher with the projection as its last module: what a perfect student would be."""
    dense = Dense(directions.shape[1], directions.shape[0], bias=False, activation_function=torch.nn.Identity())
    dense.linear.weight = torch.nn.Parameter(torch.from_numpy(directions.copy()))
    return SentenceTransformer(modules=[*teacher.children(), dense, Normalize()], device=str(teacher.device))
