"""The package's names, which are imported on first use."""

import importlib
import subprocess
import sys

import pytest

import mote


@pytest.mark.parametrize("module", ["mote", "mote.experts", "mote.analysis"])
def test_every_public_name_exists(module: str) -> None:
    found = importlib.import_module(module)
    for name in found.__all__:
        assert getattr(found, name) is not None


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="module 'mote' has no attribute 'upcycel'"):
        mote.upcycel  # type: ignore[attr-defined]  # noqa: B018
    assert "upcycle" in dir(mote)


@pytest.mark.processes
def test_importing_the_package_imports_no_library() -> None:
    code = "import mote, sys; assert not {'torch', 'transformers', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
