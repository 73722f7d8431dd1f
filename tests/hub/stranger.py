"""A stranger's machine: transformers is installed, this project is not."""

# Begins a program that runs there.
STRANGER = """
import sys
from importlib.abc import MetaPathFinder

class NotInstalled(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "mote":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NotInstalled())
"""
