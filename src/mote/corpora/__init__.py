"""Corpora: embedded by any model; datasets of pairs with mined negatives, or filtered."""

from mote.corpora.embed import embed_corpus
from mote.corpora.shards import read_embeddings

__all__ = ["embed_corpus", "read_embeddings"]
