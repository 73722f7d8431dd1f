"""The files for `accelerate launch`: accelerate reads them, and they name what exists."""

from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from helpers.paths import ROOT

from mote.remote import modeling_mote

FOLDER = ROOT / "examples" / "accelerate"


@pytest.mark.parametrize(("name", "kind"), [("ddp", "MULTI_GPU"), ("deepspeed_stage2", "DEEPSPEED"), ("fsdp2", "FSDP")])
def test_accelerate_reads_each_file(name: str, kind: str) -> None:
    config: Any = load_config_from_file(str(FOLDER / f"{name}.yaml"))  # an unknown key is an error
    assert config.distributed_type == kind
    assert config.mixed_precision == "no"  # else it overrides the recipe's


def test_fsdp_wraps_the_blocks() -> None:
    config: Any = load_config_from_file(str(FOLDER / "fsdp2.yaml"))
    wrapped = config.fsdp_config["fsdp_transformer_layer_cls_to_wrap"].split(",")
    assert all(hasattr(modeling_mote, name) for name in wrapped)
