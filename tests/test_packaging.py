"""The distribution has every module and package, and the files that models carry depend on nothing above them."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import REMOTE, ROOT

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and later")
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
# Each may import those before it.
REMOTE_CODE = [
    "configuration_mote",
    "architectures_mote",
    "mixed_batch_mote",
    "modeling_mote",
    "sentence_transformer_mote",
    "compression_mote",
    "masked_lm_mote",
    "token_routing_mote",
    "token_routed_masked_lm_mote",
    "hierarchical_mote",
    "sparse_pooling_mote",
    "instruction_mote",
    "task_instruction_mote",
    "attention_pooling_mote",
]


def test_the_files_at_the_root_are_those_of_the_package() -> None:
    """Links, which a clone on Windows without `core.symlinks` turns into text files."""
    at_root = [path.name for path in ROOT.glob("*_mote.py")]
    assert sorted(at_root) == ["configuration_mote.py", "modeling_mote.py"]
    for name in at_root:
        assert (REMOTE / name).read_bytes() == (ROOT / name).read_bytes()


def test_a_clone_without_links_says_what_to_do(tmp_path: Path) -> None:
    package = shutil.copytree(REMOTE, tmp_path / "remote_without_links", symlinks=True)
    for name in ("configuration_mote.py", "modeling_mote.py"):
        target = (package / name).readlink()
        (package / name).unlink()
        (package / name).write_text(str(target))
    command = [sys.executable, "-c", "import remote_without_links"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.stderr.splitlines()[-1].startswith("ImportError: Links are text files: `git config core.symlinks true`")


def test_every_package_is_distributed() -> None:
    packages = {".".join(path.parent.relative_to(ROOT / "src").parts) for path in ROOT.glob("src/**/__init__.py")}
    assert set(SETUPTOOLS["packages"]) == packages | {"mote.hub_card", "mote.example_data"}


@pytest.mark.parametrize("module", REMOTE_CODE)
def test_remote_code_depends_on_lower_files_alone(module: str) -> None:
    tree = ast.parse((REMOTE / f"{module}.py").read_text(encoding="utf-8"))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == (1 if (node.module or "").endswith("_mote") else 0)
            imported.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
    ours = {name for name in imported if name == "mote" or name.endswith("_mote")}
    assert ours <= set(REMOTE_CODE[: REMOTE_CODE.index(module)])


def test_all_remote_code_is_listed() -> None:
    assert sorted(REMOTE_CODE) == sorted(path.stem for path in REMOTE.glob("*_mote.py"))
