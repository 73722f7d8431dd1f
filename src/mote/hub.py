"""The Hugging Face Hub: download, commits, push."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id

logger = logging.getLogger(__name__)


@contextmanager
def explained(problem: str, kind: type[OSError] | None = None, remedy: str = "") -> Iterator[None]:
    """Raise the client's errors as built-in ones, on one line; which one depends on whether the Hub answered."""
    try:
        yield
    except (HTTPError, OSError, HFValidationError) as error:  # httpx's connection errors are not OSErrors
        kind = kind or (PermissionError if isinstance(error, HfHubHTTPError) else ConnectionError)
        message = " ".join(str(error).split()).rstrip(".")
        raise kind(f"{problem}: {message}" + (f". {remedy}" if remedy else "")) from error


def local_folder(src: str | Path, revision: str | None) -> Path | None:
    """Return the folder that a source names; None for an id on the Hub. A folder has no revision: a `ValueError`."""
    folder = Path(src) if Path(src).is_dir() else None
    if folder is not None and revision is not None:
        raise ValueError(f"{src} is a folder: it has no revision {revision!r}, only sources on the Hub have one")
    return folder


def fetch(src: str, revision: str | None, patterns: list[str]) -> Path:
    """Download the files of a Hub repository that match one of the patterns, into the cache's folder of its commit."""
    login = "For a private or gated one, log in with `hf auth login`"
    with explained(f"{src} is neither a folder nor available on the Hub", FileNotFoundError, login):
        return Path(snapshot_download(src, revision=revision, allow_patterns=patterns))


def commit_of(model: str, revision: str | None = None) -> str | None:
    """Find the newest commit of a model on the Hub, or, if the Hub does not answer, the downloaded one.

    None for a folder. An adapter is refused: its commit says nothing about the weights that it adapts.
    """
    folder = local_folder(model, revision)
    found = folder or fetch(model, revision, ["config.json", "modules.json", "*adapter_config.json"])
    refuse_adapter(found, model)
    return None if folder else found.name


def refuse_adapter(folder: Path, name: str) -> None:
    """Raise `ValueError` if a folder holds an adapter, whose files say nothing about the weights that it adapts."""
    if any(file for place in (".", "0_*") for file in folder.glob(f"{place}/adapter_config.json")):
        raise ValueError(f"{name} is a PEFT adapter: merge it into its base model first (merge_and_unload)")


def check_before_push(repo_id: str) -> str:
    """Make sure, before any work is done, that a push is possible; return `user/name` for a name."""
    validate_repo_id(repo_id)
    with explained("The push would fail, nothing was started"):
        user = HfApi().whoami()
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise PermissionError(
            f"The token of {user['name']} is read-only: create one with write access at huggingface.co/settings/tokens"
        )
    return repo_id if "/" in repo_id else f"{user['name']}/{repo_id}"


def push(
    folder: Path, repo_id: str, files: list[str], replaced: Sequence[str], private: bool, parent: str | None = None
) -> None:
    """Create or update a model repository from a folder.

    Only `files` are pushed, since a folder that was overwritten may hold others; older ones that match `replaced` are
    deleted. With `parent`, it is an error if the newest commit is another one by now. After an error the folder stays.
    """
    later = f"The model is complete in {folder}; push it later with `mote push {folder} {repo_id}`"
    if parent is not None:
        later = f"The model is complete in {folder}. If the repository has changed, change its newest state instead"
    with explained(f"{repo_id} was not pushed", remedy=later):
        HfApi().create_repo(repo_id, private=private, exist_ok=True)
        commit = HfApi().upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message="Upload a MoTE model",
            parent_commit=parent,
            allow_patterns=files,
            delete_patterns=list(replaced),
        )
    logger.info("Pushed: %s", commit.commit_url)
