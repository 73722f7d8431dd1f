"""Where the repository, its small encoder, and real checkpoints and data are."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL_ENCODER = ROOT / "examples" / "small-encoder"
SMALL_MOTE = ROOT / "examples" / "small-mote"
SHARED = ROOT.parent / "shared"
EXAMPLE_DATA = ROOT / "examples" / "data"
REMOTE = ROOT / "src" / "mote" / "remote"
