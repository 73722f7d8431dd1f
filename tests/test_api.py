"""The package's names, which are imported on first use."""

import ast
from importlib.metadata import version
from pathlib import Path

import pytest
from helpers.processes import run_python

import mote


def test_every_public_name_exists() -> None:
    names = dir(mote)
    assert all(getattr(mote, name) is not None for name in names)
    assert sorted(mote.__all__) == names
    tree = ast.parse(Path(str(mote.__file__)).read_text(encoding="utf-8"))
    for_type_checkers = next(node.body for node in tree.body if isinstance(node, ast.If))
    imported = [alias.name for node in for_type_checkers if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(imported) == sorted(names)


def test_results_are_shown_as_tables(fresh_folder: Path) -> None:
    experts = mote.experts.list_experts(str(fresh_folder))
    assert repr(experts) == str(experts)
    assert experts._repr_markdown_().split()[:6] == ["|", "expert", "|", "parameters", "|", "instruction"]
    evaluation = mote.Evaluation({"a": {"x": 1.0}}, {"x": "STS"})
    assert "| STS (1)                | 1.00 |" in repr(evaluation)
    assert repr(evaluation) == evaluation._repr_markdown_()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="module 'mote' has no attribute 'upcycel'"):
        mote.upcycel  # type: ignore[attr-defined]  # noqa: B018
    assert mote.__version__ == version("mote-embeddings")


def test_a_folder_called_mote_hides_nothing(tmp_path: Path) -> None:
    """As beside a clone, also where an editable install is that clone (as in CI)."""
    (tmp_path / "mote" / "src").mkdir(parents=True)
    run_python("import sys; sys.path.insert(0, ''); import mote; mote.WriteOptions", cwd=tmp_path)
