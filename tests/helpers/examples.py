"""Files of the examples as modules."""

import importlib.util
import sys
from types import ModuleType

from helpers.paths import ROOT


def example(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_" + path.replace("/", "_"), ROOT / "examples" / f"{path}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
