"""The files for `accelerate launch`: accelerate reads them, and they name what exists."""

from typing import Any

import pytest
from accelerate import FullyShardedDataParallelPlugin
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
    settings = {name.removeprefix("fsdp_"): value for name, value in config.fsdp_config.items()}
    wrapped = settings.pop("transformer_layer_cls_to_wrap")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=settings.pop("version"),
        auto_wrap_policy=settings.pop("auto_wrap_policy"),
        transformer_cls_names_to_wrap=wrapped.split(","),
        cpu_offload=settings.pop("offload_params"),
        state_dict_type=settings.pop("state_dict_type"),
        **settings,
    )
    assert plugin.fsdp_version == 2
    assert all(hasattr(modeling_mote, name) for name in plugin.transformer_cls_names_to_wrap)
