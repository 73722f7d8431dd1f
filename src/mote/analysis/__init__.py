"""How far the experts of a model have specialised."""

from mote.analysis.analyze import Analysis, ModelAnalysis, analyze
from mote.analysis.divergence import (
    Divergence,
    as_distributions,
    divergence_of,
    js_divergence,
    kl_divergence,
    neighbor_distributions,
    tsne,
)
from mote.analysis.plots import draw_similarity, draw_tsne, draw_weight_change
from mote.analysis.similarity import Similarity, WelchTest, inter_task_similarity, welch_tests
from mote.analysis.weight_change import WeightChange, find_start, weight_change_of
from mote.data.texts import TextPairs, Texts, find_pairs, find_texts

__all__ = [
    "Analysis",
    "Divergence",
    "ModelAnalysis",
    "Similarity",
    "TextPairs",
    "Texts",
    "WeightChange",
    "WelchTest",
    "analyze",
    "as_distributions",
    "divergence_of",
    "draw_similarity",
    "draw_tsne",
    "draw_weight_change",
    "find_pairs",
    "find_start",
    "find_texts",
    "inter_task_similarity",
    "js_divergence",
    "kl_divergence",
    "neighbor_distributions",
    "tsne",
    "weight_change_of",
    "welch_tests",
]
