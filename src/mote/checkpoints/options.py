"""How results are written."""

from typing import Annotated

from pydantic import Field

from mote.settings import Settings


class WriteOptions(Settings):
    """How a result is written.

    Attributes:
        overwrite: Replace the content of the output folder, if it is a model or an expert that this package wrote;
            other files in the folder are kept.
        max_shard_size: Maximum size of a weight file, as in 500MB.
        push: Push the result to the Hub.
        repo_id: Repository to push to, as `user/name`. Default: the name of the output folder, under the user of the
            token.
        private: Make a new repository on the Hub private.
    """

    overwrite: bool = False
    max_shard_size: Annotated[str, Field(pattern=r"^[1-9]\d*(\.\d+)?[KMGT]B$")] = "5GB"
    push: bool = False
    repo_id: str | None = None
    private: bool = False
