"""The wheel, built and installed where there is no clone: its metadata, its types, and what users do first."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest
from helpers.paths import REMOTE, ROOT, SMALL_ENCODER


def run(*command: object, cwd: Path, status: int = 0) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def built(folder: Path, source: str | None = None) -> Path:
    """Build the wheel, as if the repository were published at `source`."""
    copy = folder / "clone"
    unused = shutil.ignore_patterns(".*", "tests", "benchmarks", "research", "docs", "runs", "build", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=unused)
    if source is not None:
        settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        added = settings.replace("[project.urls]", f'[project.urls]\nSource = "{source}"\n#', 1)
        (copy / "pyproject.toml").write_text(added, encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", folder, copy, cwd=folder)
    shutil.rmtree(copy)
    return next(folder.glob("*.whl"))


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
    shown = run(sys.executable, "-c", "import remote_without_links", cwd=tmp_path, status=1)
    assert shown.splitlines()[-1].startswith("ImportError: Links are text files: `git config core.symlinks true`")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """The interpreter of a fresh environment with the wheel, and the packages of this one."""
    folder = tmp_path / "env"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=tmp_path)
    packages = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    python = folder / "bin" / "python"
    torch = find_spec("torch")
    assert torch is not None
    others = dict.fromkeys([sysconfig.get_paths()["purelib"], str(Path(str(torch.origin)).parents[1])])
    place = Path(run(python, "-c", packages, cwd=folder).strip())
    (place / "dependencies.pth").write_text("\n".join(others) + "\n")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", "--ignore-installed", wheel, cwd=folder)
    return python


def metadata_of(wheel: Path) -> str:
    with ZipFile(wheel) as file:
        name = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return file.read(name).decode()


def test_links_in_the_metadata_lead_somewhere(wheel: Path, tmp_path: Path) -> None:
    text = metadata_of(wheel)
    assert re.findall(r"\]\((?!https://)[^)]*\)", text) == []
    assert " Speed: 1.00 to 1.02 times" in text  # a link as long as it leads nowhere
    assert "[Paper](https://arxiv.org/abs/2506.17781)" in text
    published = metadata_of(built(tmp_path, "https://example.org/you/mote"))
    assert "[Speed](https://example.org/you/mote/blob/main/docs/performance.md)" in published
    assert "](https://example.org/you/mote/raw/main/docs/images/quickstart.png)" in published


def test_what_it_holds(wheel: Path) -> None:
    with ZipFile(wheel) as file:
        names = set(file.namelist())
        for path in REMOTE.glob("*_mote.py"):
            assert file.read(f"mote/remote/{path.name}") == path.read_bytes()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"mote"}
    modules = {f"mote/{path.relative_to(ROOT / 'src/mote')}" for path in (ROOT / "src/mote").rglob("*.py")}
    assert {*modules, "mote/py.typed", "mote/recipes/smoke.yaml", "mote/example_data/README.md"} <= names
    assert not any(name.startswith(("tests/", "setup", "examples/")) for name in names)
    assert wheel.stat().st_size < 1_000_000


@pytest.mark.slow
def test_without_a_clone(installed: Path, tmp_path: Path) -> None:
    mote = installed.with_name("mote")
    source = shutil.copytree(SMALL_ENCODER, tmp_path / "encoder")
    place = tmp_path / "empty"
    place.mkdir()
    assert "upcycle" in run(mote, "--help", cwd=place)
    assert run(mote, "--version", cwd=place).startswith("mote ")
    for command in (("upcycle", "--src", "examples/small-encoder"), ("train", "smoke")):
        error = run(mote, *command, cwd=place, status=1)
        assert "examples/small-encoder is neither a folder nor available on the Hub" in error
    run(mote, "upcycle", "--src", source, "--out", "small-mote", cwd=place)
    encode = """
import mote
from sentence_transformers import SentenceTransformer
assert "site-packages" in mote.__file__, mote.__file__
model = SentenceTransformer("small-mote", trust_remote_code=True)
print(model.encode_query(["whales"]).shape, mote.__version__)
"""
    assert "(1, 256) 0.1.0" in run(installed, "-c", encode, cwd=place)
    run(mote, "export", "small-mote", "--expert", "clustering", "--out", "dense", cwd=place)
    run(mote, "set", "small-mote", "--default-task", "clustering", cwd=place)
    settings = ("max_steps=2", "batch_size=16", "mini_batch_size=8", "eval_steps=null")
    run(mote, "train", "smoke", f"model.source={source}", *(f"training.{one}" for one in settings), cwd=place)
    assert {*(place / "runs" / "smoke" / "model").glob("model-base-*.safetensors")}
