"""MoTE: text-embedding models with one feed-forward expert per task."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mote import experts as experts
    from mote.analysis.analyze import analyze as analyze
    from mote.analysis.results import Analysis as Analysis
    from mote.checkpoints.cards import write_card as write_card
    from mote.checkpoints.definitions import instruction_with as instruction_with
    from mote.checkpoints.options import WriteOptions as WriteOptions
    from mote.checkpoints.sentence_transformers import prompts_of as prompts_of
    from mote.checkpoints.transform import transform as transform
    from mote.corpora.embed import embed_corpus as embed_corpus
    from mote.corpora.generating import generate_queries as generate_queries
    from mote.corpora.mining import filter_pairs as filter_pairs
    from mote.corpora.mining import mine_negatives as mine_negatives
    from mote.evaluation.evaluate import evaluate as evaluate
    from mote.evaluation.metadata import model_meta as model_meta
    from mote.evaluation.scores import Evaluation as Evaluation
    from mote.experts.configuring import configure as configure
    from mote.inference.loading import load as load
    from mote.inference.loading import load_encoder as load_encoder
    from mote.inference.offloading import offload as offload
    from mote.inference.offloading import restore as restore
    from mote.inference.routing import open_router as open_router
    from mote.inference.routing import train_router as train_router
    from mote.inference.runtimes import load_exported as load_exported
    from mote.inference.speed import speed_up as speed_up
    from mote.lengthening import lengthen as lengthen
    from mote.remote.configuration_mote import MoTEConfig as MoTEConfig
    from mote.remote.modeling_mote import MoTEModel as MoTEModel
    from mote.training.memory import MemoryEstimate as MemoryEstimate
    from mote.training.memory import estimate_memory as estimate_memory
    from mote.training.pretraining import pretrain as pretrain
    from mote.training.train import train as train
    from mote.upcycling.options import UpcyclingOptions as UpcyclingOptions
    from mote.upcycling.plan import UpcyclingPlan as UpcyclingPlan
    from mote.upcycling.plan import plan_upcycling as plan_upcycling
    from mote.upcycling.upcycle import upcycle as upcycle

    __version__: str

# Imported on first use: torch and transformers take seconds, for which `mote --help` should not wait.
_NAMES = {
    "mote.analysis.analyze": ["analyze"],
    "mote.analysis.results": ["Analysis"],
    "mote.checkpoints.cards": ["write_card"],
    "mote.checkpoints.definitions": ["instruction_with"],
    "mote.checkpoints.options": ["WriteOptions"],
    "mote.checkpoints.sentence_transformers": ["prompts_of"],
    "mote.checkpoints.transform": ["transform"],
    "mote.corpora.embed": ["embed_corpus"],
    "mote.corpora.generating": ["generate_queries"],
    "mote.corpora.mining": ["filter_pairs", "mine_negatives"],
    "mote.evaluation.evaluate": ["evaluate"],
    "mote.evaluation.metadata": ["model_meta"],
    "mote.evaluation.scores": ["Evaluation"],
    "mote.experts.configuring": ["configure"],
    "mote.inference.loading": ["load", "load_encoder"],
    "mote.inference.offloading": ["offload", "restore"],
    "mote.inference.routing": ["open_router", "train_router"],
    "mote.inference.runtimes": ["load_exported"],
    "mote.inference.speed": ["speed_up"],
    "mote.lengthening": ["lengthen"],
    "mote.remote.configuration_mote": ["MoTEConfig"],
    "mote.remote.modeling_mote": ["MoTEModel"],
    "mote.training.memory": ["MemoryEstimate", "estimate_memory"],
    "mote.training.pretraining": ["pretrain"],
    "mote.training.train": ["train"],
    "mote.upcycling.options": ["UpcyclingOptions"],
    "mote.upcycling.plan": ["UpcyclingPlan", "plan_upcycling"],
    "mote.upcycling.upcycle": ["upcycle"],
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["experts", *_MODULES]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("mote-embeddings")
    if name == "experts":
        return import_module("mote.experts")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
