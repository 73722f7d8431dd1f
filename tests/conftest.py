"""Models that several test files share."""

import gc
import logging
import os
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests that need a hub start one, for processes of their own
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="mote-tests-")  # of this pytest-xdist worker alone
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny, and workers share the cores

import pytest
from helpers import token_routing
from helpers.checkpoints import dense_checkpoint, trusted
from helpers.families import make_different
from helpers.paths import SHARED, SMALL_ENCODER
from helpers.tiers import starts_processes
from sentence_transformers import SentenceTransformer

from mote import upcycle
from mote.remote.hierarchical_mote import HierarchicalMoTEModel
from mote.remote.modeling_mote import MoTEModel
from mote.remote.token_routing_mote import TokenRoutedModel

sys.modules["mote.auto"] = types.ModuleType("mote.auto")  # only in processes of their own: most tests load remote code


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that start processes into their tier."""
    for item in items:
        if starts_processes(item):
            item.add_marker("processes")


def pytest_collection_finish() -> None:
    """Spare each training run's garbage collection a look at all that has been imported."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["HF_MODULES_CACHE"], ignore_errors=True)


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Take back what a command that ran in the test's process has set up for the logger `mote`."""
    logger = logging.getLogger("mote")
    handlers, level = [*logger.handlers], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with random weights, in Transformers' format alone."""
    return dense_checkpoint(tmp_path_factory.mktemp("dense") / "tiny")


@pytest.fixture(scope="session")
def upcycled(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, upcycled."""
    return upcycle(str(dense), tmp_path_factory.mktemp("upcycled") / "tiny-mote")


@pytest.fixture(scope="session")
def trained(upcycled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with experts that differ."""
    folder = shutil.copytree(upcycled, tmp_path_factory.mktemp("trained") / "tiny-mote")
    make_different(MoTEModel.from_pretrained(upcycled)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def token_routed(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, upcycled with token routing in the second of its two blocks; networks and routers differ."""
    folder = upcycle(str(dense), tmp_path_factory.mktemp("token-routed") / "tiny-token", routing="token", layers=[1])
    token_routing.make_different(TokenRoutedModel.from_pretrained(folder)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def hierarchical(token_routed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That one, upcycled to task experts."""
    return upcycle(str(token_routed), tmp_path_factory.mktemp("hierarchical") / "tiny-hierarchical")


@pytest.fixture(scope="session")
def trained_hierarchical(hierarchical: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with task experts that differ."""
    folder = shutil.copytree(hierarchical, tmp_path_factory.mktemp("trained") / "tiny-hierarchical")
    make_different(HierarchicalMoTEModel.from_pretrained(hierarchical)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def fresh_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's small encoder, upcycled with the instructions of the paper."""
    return upcycle(str(SMALL_ENCODER), tmp_path_factory.mktemp("fresh") / "small-mote", paper_instructions=True)


@pytest.fixture(scope="session")
def trained_folder(fresh_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with experts that differ, saved and reloaded as users get it."""
    folder = tmp_path_factory.mktemp("trained") / "small-mote"
    model = trusted(fresh_folder)
    make_different(model[0].model)
    model.save(str(folder))
    return folder


@pytest.fixture(scope="session")
def model(trained_folder: Path) -> SentenceTransformer:
    """That one in memory, for tests that leave it as it is."""
    return trusted(trained_folder)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real checkpoints and data next to the repository, where there are any."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared next to the repository")
    return SHARED
