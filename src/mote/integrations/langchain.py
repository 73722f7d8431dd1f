"""LangChain: `MoTEEmbeddings`, for vector stores and retrievers."""

from mote.integrations import extra
from mote.integrations.encoder import TaskEncoder

with extra("langchain"):
    from langchain_core.embeddings import Embeddings


class MoTEEmbeddings(TaskEncoder, Embeddings):
    """LangChain's `Embeddings`: queries through the query expert, documents through the document expert.

    Arguments and errors are those of [`TaskEncoder`][mote.integrations.encoder.TaskEncoder].
    """

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Embed documents: B texts to B lists of H numbers."""
        return self.encode_documents(texts).tolist()

    def embed_query(self, text: str) -> list[float]:
        """Embed a query: a list of H numbers."""
        return self.encode_queries([text])[0].tolist()
