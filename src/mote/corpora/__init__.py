"""Corpora: embedded by any model; datasets of pairs with mined negatives, or filtered."""

from mote.corpora.embed import embed_corpus
from mote.corpora.filtering import filter_pairs
from mote.corpora.mining import MiningSettings
from mote.corpora.negatives import mine_negatives
from mote.corpora.run import Teacher
from mote.corpora.store import read_embeddings

__all__ = ["MiningSettings", "Teacher", "embed_corpus", "filter_pairs", "mine_negatives", "read_embeddings"]
