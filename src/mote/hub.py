"""The Hugging Face Hub: download, commits, push."""

from pathlib import Path

from huggingface_hub import HfApi, get_token, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id


def fetch(src: str, revision: str | None, patterns: list[str]) -> Path:
    """Download the files of a Hub repository that match one of the patterns, into the Hub's cache.

    Raises:
        FileNotFoundError: If the repository does not exist, is gated, or cannot be reached.
    """
    try:
        return Path(snapshot_download(src, revision=revision, allow_patterns=patterns))
    except HFValidationError as error:
        raise FileNotFoundError(f"{src} is neither a folder nor an id on the Hub (user/name)") from error
    except GatedRepoError as error:
        raise FileNotFoundError(
            f"{src} is gated: accept its terms on the Hub and log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{src} is neither a folder nor a repository on the Hub (for a private one, log in with `hf auth login`)"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise FileNotFoundError(f"{src} is not a folder, and could not be fetched from the Hub: {error}") from error


def newest_commit(name: str, revision: str | None = None) -> str:
    """Find the newest commit of a repository on the Hub; if it does not answer, the one that was downloaded.

    Args:
        name: The repository.
        revision: Branch, tag or commit. Default: the main branch.

    Raises:
        FileNotFoundError: If there is none.
    """
    try:
        return str(HfApi().model_info(name, revision=revision).sha)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:  # also a gated one, which is a subclass
        raise FileNotFoundError(f"{name} is neither a folder nor available on the Hub: {_reason(error)}") from error
    except HFValidationError as error:
        raise FileNotFoundError(f"{name} is neither a folder nor an id on the Hub (user/name)") from error
    except (HTTPError, OSError, OfflineModeIsEnabled) as error:  # busy, or out of reach
        file = try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(file, str):
            return Path(file).parent.name
        problem = f"failed: {_reason(error)}" if isinstance(error, HfHubHTTPError) else "cannot be reached"
        raise FileNotFoundError(f"{name} is not a folder, and the Hub {problem}") from error


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def commit_of(model: str, revision: str | None = None) -> str | None:
    """Make sure that a model exists; find its newest commit on the Hub, of the main branch or of another revision.

    Returns:
        The commit; None for a folder.

    Raises:
        FileNotFoundError: If it is neither a folder with a model nor on the Hub.
        ValueError: If the folder holds an adapter, so that most weights are elsewhere and may change there.
    """
    folder = Path(model)
    if not folder.is_dir():
        return newest_commit(model, revision)
    if any(file for place in (".", "0_*") for file in folder.glob(f"{place}/adapter_config.json")):
        raise ValueError(
            f"{model} holds an adapter (adapter_config.json), not the model that it adapts: merge the two first, with "
            "PEFT's `merge_and_unload`, and save the result"
        )
    if not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
        raise FileNotFoundError(f"{model} has neither config.json nor modules.json: it is not a model")
    return None


def check_before_push(repo_id: str) -> str:
    """Make sure, before any work is done, that a push is possible.

    Args:
        repo_id: `user/name`, or `name` alone for the user of the token.

    Returns:
        `user/name`.

    Raises:
        PermissionError: If there is no token, the Hub does not accept it, or it is read-only.
        ConnectionError: If the Hub cannot be reached.
        ValueError: If the name is invalid.
    """
    if get_token() is None:
        raise PermissionError("A push needs a token of the Hub: log in with `hf auth login`, or set HF_TOKEN")
    try:
        validate_repo_id(repo_id)
        user = HfApi().whoami()
    except HFValidationError as error:
        raise ValueError(f"{repo_id!r} is not a name for a repository (user/name): {error}") from error
    except HfHubHTTPError as error:
        raise PermissionError(
            f"The Hub did not accept the token, log in again with `hf auth login`: {error}"
        ) from error
    except (HTTPError, OSError) as error:  # httpx's connection errors are not OSErrors
        raise ConnectionError(f"The Hub cannot be reached for the push, nothing was started: {error}") from error
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise PermissionError(
            f"The token of {user['name']} may only read: make one with write access at huggingface.co/settings/tokens"
        )
    return repo_id if "/" in repo_id else f"{user['name']}/{repo_id}"


def refuse_whole_model(repo_id: str) -> None:
    """Make sure that a repository does not already contain a full model.

    Raises:
        ConnectionError: If the Hub cannot be asked.
        ValueError: If it contains one.
    """
    try:
        is_model = HfApi().file_exists(repo_id, "config.json")
    except (HTTPError, OSError) as error:
        raise ConnectionError(f"The Hub cannot be asked what is in {repo_id}, nothing was started: {error}") from error
    if is_model:
        raise ValueError(
            f"{repo_id} holds a whole model, whose weights and card a push would replace: name another repository "
            "with `--repo-id`"
        )


def push(folder: Path, repo_id: str, files: list[str], private: bool = False, what: str = "a MoTE model") -> str:
    """Create or update a model repository from a folder.

    Args:
        folder: Folder to push.
        repo_id: Repository, `user/name`.
        files: Files to push: a folder that was overwritten may hold others.
        private: Make a new repository private.
        what: Content of the folder, for the commit message.

    Returns:
        The URL of the commit.

    Raises:
        PermissionError: If the Hub refuses; the folder stays as it is.
        ConnectionError: If the connection breaks; likewise.
    """
    api = HfApi()
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=f"Upload {what}",
            allow_patterns=files,
            # Weights of a version with other shards, and not what others have added under a similar name:
            delete_patterns=["model.safetensors", "model-[0-9]*-of-[0-9]*.safetensors", "model.safetensors.index.json"],
        )
    except HfHubHTTPError as error:
        raise PermissionError(f"The Hub refused to take {repo_id}: {error}\n{_push_later(folder, repo_id)}") from error
    except (HTTPError, OSError) as error:
        raise ConnectionError(f"The push of {repo_id} was cut off: {error}\n{_push_later(folder, repo_id)}") from error
    return str(commit.commit_url)


def push_card(card: str, repo_id: str) -> str:
    """Replace the card of a model on the Hub.

    Args:
        card: Content of README.md.
        repo_id: Repository of the model, `user/name`.

    Returns:
        The URL of the commit.

    Raises:
        PermissionError: If the Hub refuses, or has no such model.
        ConnectionError: If the connection breaks.
    """
    try:
        commit = HfApi().upload_file(
            path_or_fileobj=card.encode(),
            path_in_repo="README.md",
            repo_id=repo_id,
            commit_message="Update the model card",
        )
    except RepositoryNotFoundError as error:
        raise PermissionError(
            f"{repo_id} is not on the Hub: push the model first, `hf upload {repo_id} DIR`"
        ) from error
    except HfHubHTTPError as error:
        raise PermissionError(f"The Hub refused to take the card of {repo_id}: {error}") from error
    except (HTTPError, OSError) as error:
        raise ConnectionError(f"The push of the card of {repo_id} was cut off: {error}") from error
    return str(commit.commit_url)


def _push_later(folder: Path, repo_id: str) -> str:
    return f"The model is complete in {folder}; push it later with `hf upload {repo_id} {folder}`"
