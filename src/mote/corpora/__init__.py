"""Corpora: embedded by any model, and their embeddings read."""

from mote.corpora.embed import embed_corpus
from mote.corpora.store import read_embeddings

__all__ = ["embed_corpus", "read_embeddings"]
