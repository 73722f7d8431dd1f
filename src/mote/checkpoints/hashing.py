"""Hash of the content of a model's folder."""

from hashlib import blake2b
from pathlib import Path

_IGNORED = (".md", ".png")  # cards and pictures; any other file may change an embedding


def folder_hash(folder: Path) -> str:
    """Hash the files of a model's folder with their names, apart from cards, pictures and hidden files."""
    digest = blake2b(digest_size=16)
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        path = file.relative_to(folder)
        if path.suffix in _IGNORED or any(part.startswith(".") or part == "__pycache__" for part in path.parts):
            continue
        name = path.as_posix().encode()
        digest.update(len(name).to_bytes(8, "big") + name + file.stat().st_size.to_bytes(8, "big"))
        with file.open("rb") as content:
            while block := content.read(2**20):
                digest.update(block)
    return digest.hexdigest()
