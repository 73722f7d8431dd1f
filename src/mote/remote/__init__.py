"""Code of saved models: loaded from there with `trust_remote_code=True`, and from here by the package."""

from pathlib import Path

# Where Git may not make links, as on Windows by default, it writes text files that hold the paths of their targets.
if Path(__file__).with_name("modeling_mote.py").stat().st_size < 100:
    raise ImportError("Links are text files: `git config core.symlinks true`, then `git checkout -- src/mote/remote`")
