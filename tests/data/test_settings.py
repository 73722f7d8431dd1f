"""Settings of datasets."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from mote.data.settings import DatasetSource


def test_a_path_alone_is_enough() -> None:
    settings = DatasetSource.model_validate("retrieval/*")
    assert (settings.path, settings.split, settings.columns, settings.exclude) == ("retrieval/*", "train", {}, [])


def test_a_mistyped_key_names_the_nearest() -> None:
    with pytest.raises(ValidationError, match=r"unknown key 'splitt'\. Did you mean 'split'"):
        DatasetSource.model_validate({"path": "a", "splitt": "dev"})


@pytest.mark.processes
@pytest.mark.parametrize("module", ["rows", "columns", "texts", "test_sets"])
def test_reading_data_imports_nothing_of_training(module: str) -> None:
    code = f"import sys, mote.data.{module}; print([name for name in sys.modules if name.startswith('mote.training')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
