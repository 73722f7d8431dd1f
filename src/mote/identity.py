"""What tells one model from all others: a hash of its folder's files, or its commit on the Hub."""

from hashlib import blake2b
from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled

_NO_PART_OF_A_MODEL = (".md", ".png")  # all other files may change an embedding


def fingerprint(folder: Path) -> str:
    """Hash the files of a model's folder, with their names; not cards, pictures and hidden files."""
    digest = blake2b(digest_size=16)
    for file in sorted(file for file in folder.rglob("*") if file.is_file() and _matters(file.relative_to(folder))):
        name = file.relative_to(folder).as_posix().encode()
        digest.update(len(name).to_bytes(8, "big") + name + file.stat().st_size.to_bytes(8, "big"))
        with file.open("rb") as content:
            while block := content.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def _matters(file: Path) -> bool:
    hidden = any(part.startswith(".") or part == "__pycache__" for part in file.parts)
    return not hidden and file.suffix not in _NO_PART_OF_A_MODEL


def newest_commit(name: str) -> str:
    """Find the newest commit of a model on the Hub or, without a connection, the one that was downloaded.

    Raises:
        FileNotFoundError: If there is none.
    """
    try:
        return str(HfApi().model_info(name).sha)
    except HfHubHTTPError as error:
        said = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(f"{name} is no folder, and the Hub does not give it: {said}") from error
    except HFValidationError as error:
        raise FileNotFoundError(f"{name} is neither a folder nor an id on the Hub (user/name)") from error
    except (HTTPError, OSError, OfflineModeIsEnabled) as error:
        file = try_to_load_from_cache(name, "config.json")
        if isinstance(file, str):
            return Path(file).parent.name
        raise FileNotFoundError(f"{name} is no folder, and the Hub cannot be reached") from error
