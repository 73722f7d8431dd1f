"""The hash of a model's folder."""

import shutil
from pathlib import Path

from helpers.paths import SMALL_ENCODER

from mote.checkpoints.hashing import folder_hash


def test_cards_pictures_and_hidden_files_do_not_count(tmp_path: Path) -> None:
    folder = shutil.copytree(SMALL_ENCODER, tmp_path / "model")
    before = folder_hash(folder)
    (folder / "README.md").write_text("another card")
    (folder / "chart.png").write_bytes(b"another picture")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("main")
    assert folder_hash(folder) == before
    (folder / "modeling.py").write_text("")
    assert folder_hash(folder) != before
