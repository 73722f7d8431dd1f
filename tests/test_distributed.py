"""Several processes: the shipped settings of accelerate, and gradients that are those of one process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from conftest import ROOT

from modeling_mote import MoTEModel

SETTINGS = ROOT / "examples" / "accelerate"
FILES = {"ddp.yaml": "MULTI_GPU", "fsdp2.yaml": "FSDP", "deepspeed_stage2.yaml": "DEEPSPEED"}


def launch_arguments(name: str) -> Any:
    """What `accelerate launch` makes of a file."""
    words = ["--config_file", str(SETTINGS / name), "-m", "mote", "train", "recipe.yaml", "--dry-run"]
    return _validate_launch_command(launch_command_parser().parse_args(words))[0]


def test_every_file_is_listed() -> None:
    assert {path.name for path in SETTINGS.iterdir()} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_accelerate_understands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # otherwise accelerate says that it sets it
    config = load_config_from_file(str(SETTINGS / name))  # which refuses keys that it does not know
    assert (config.distributed_type, config.num_processes, config.mixed_precision) == (FILES[name], 8, "bf16")
    arguments = launch_arguments(name)
    assert (arguments.module, arguments.training_script) == (True, "mote")
    assert arguments.training_script_args == ["train", "recipe.yaml", "--dry-run"]
    assert (arguments.use_fsdp, arguments.use_deepspeed) == (name == "fsdp2.yaml", name == "deepspeed_stage2.yaml")


def test_what_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    fsdp = launch_arguments("fsdp2.yaml")
    assert int(fsdp.fsdp_version) == 2
    assert fsdp.fsdp_transformer_layer_cls_to_wrap in MoTEModel._no_split_modules
    assert launch_arguments("deepspeed_stage2.yaml").zero_stage == 2


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "mote", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "usage: mote" in done.stdout


# Two real processes --------------------------------------------------------------------------------------------------

STEP = """
import os, sys

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
)
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from transformers import TrainerCallback

source, out = sys.argv[1:]
torch.set_num_threads(1)
processes, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
model = SentenceTransformer(source, trust_remote_code=True)
words = "whale bread stock engine river piano planet soup".split()
data = Dataset.from_dict(
    {"anchor": [f"what is a {word}" for word in words], "positive": [f"the {word} is a thing" for word in words]}
)
arguments = SentenceTransformerTrainingArguments(
    output_dir=out + "-trainer", per_device_train_batch_size=len(words) // processes, max_steps=1, max_grad_norm=0.0,
    report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True, seed=0,
    ddp_backend="gloo" if processes > 1 else None,
    prompts={"anchor": "search_query: ", "positive": "search_document: "},
)


class Catch(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        torch.save({name: p.grad for name, p in getattr(model, "module", model).named_parameters()}, f"{out}.{rank}")


loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=2, gather_across_devices=True)
SentenceTransformerTrainer(model=model, args=arguments, train_dataset=data, loss=loss, callbacks=[Catch()]).train()
"""


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one(trained_folder: Path, tmp_path: Path) -> None:
    """Queries and documents go to different experts, each mini-batch has a backward pass of its own."""
    pytest.importorskip("datasets")
    (tmp_path / "step.py").write_text(STEP)
    script = [str(tmp_path / "step.py"), str(trained_folder)]
    options = ["--num_processes", "2", "--mixed_precision", "no", "--main_process_port", "0"]
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(SETTINGS / "ddp.yaml"), *options]
    for words in ([*script, str(tmp_path / "one")], [*launch, *script, str(tmp_path / "two")]):
        done = subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
    one = torch.load(tmp_path / "one.0")
    used = {"search_query", "search_document"}
    for rank in (0, 1):
        for name, gradient in torch.load(tmp_path / f"two.{rank}").items():
            if ".experts." in name and name.split(".experts.")[1].split(".")[0] not in used:
                assert gradient is None
                assert one[name] is None
            else:
                assert one[name].abs().max() > 0 or name.endswith("key.bias"), name
                assert (gradient - one[name]).abs().max() <= 1e-5, name
