"""What tells one model from all others: its name, and a hash of its folder's files or its commit on the Hub."""

from collections.abc import Sequence
from hashlib import blake2b
from itertools import count
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


def commit_of(path: str) -> str | None:
    """Make sure that a model is there; find its newest commit on the Hub, of a folder none.

    Raises:
        FileNotFoundError: If it is neither a folder with a model nor on the Hub.
        ValueError: If the folder holds an adapter, so that most weights are elsewhere and may change there.
    """
    folder = Path(path)
    if not folder.is_dir():
        return newest_commit(path)
    if any(file for place in (".", "0_*") for file in folder.glob(f"{place}/adapter_config.json")):
        raise ValueError(
            f"{path} holds an adapter (adapter_config.json), not the model that it adapts: merge the two first, with "
            "PEFT's `merge_and_unload`, and save the result"
        )
    if not (folder / "config.json").is_file() and not (folder / "modules.json").is_file():
        raise FileNotFoundError(f"{path} has neither config.json nor modules.json: it is not a model")
    return None


def revision_of(path: str) -> str:
    """Return the commit of a model on the Hub, or the hash of a folder's files; errors are those of `commit_of`."""
    return commit_of(path) or fingerprint(Path(path))


def name_models(words: Sequence[str]) -> dict[str, str]:
    """Read `MODEL` or `LABEL=MODEL`.

    Without a label, a folder is called by the last parts of its path, as many as tell it apart, and the folder `model`
    of a run as the run is; a model on the Hub by its id.

    Returns:
        Label → model, in their order.

    Raises:
        ValueError: If a model is given twice without a label, two have one name, or there is nothing after a label.
    """
    pairs = [("", word) if "=" not in word or Path(word).exists() else _label_and_model(word) for word in words]
    names = iter(_last_parts([model for label, model in pairs if not label]))
    named = [(label or next(names), model) for label, model in pairs]
    labels = [label for label, _ in named]
    if len(set(labels)) < len(labels):
        raise ValueError(f"Two models have one name ({', '.join(labels)}): give them labels, as in LABEL=MODEL")
    return dict(named)


def _label_and_model(word: str) -> tuple[str, str]:
    label, _, model = word.partition("=")
    if not model:
        raise ValueError(f"{word!r} names no model: expected MODEL or LABEL=MODEL")
    return label, model


def _last_parts(models: Sequence[str]) -> list[str]:
    """Name folders by the last parts of their paths, as many as tell them apart, and others as they are."""
    parts = [Path(model).resolve().parts if Path(model).is_dir() else (model,) for model in models]
    for index, one in enumerate(parts):
        if one in parts[:index]:
            raise ValueError(f"{models[index]} is given twice")
    of_runs = [len(one) > 2 and one[-1] == "model" and one[:-1] not in parts for one in parts]
    parts = [one[:-1] if of_run else one for one, of_run in zip(parts, of_runs, strict=True)]
    return [
        "/".join(next(one[-n:] for n in count(1) if sum(other[-n:] == one[-n:] for other in parts) == 1))
        for one in parts
    ]
