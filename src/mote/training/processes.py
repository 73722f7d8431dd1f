"""The processes that train together."""

import os

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env


def processes() -> PartialState:
    """Return what this process knows of the others; without an accelerator, they are to meet on the CPU."""
    return PartialState(cpu=not torch.accelerator.is_available())


def with_deepspeed() -> bool:
    """Tell whether `accelerate launch` was told to use DeepSpeed."""
    return bool(parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"))


def deepspeed_stage() -> int:
    """Return the stage of DeepSpeed's ZeRO that `accelerate launch` was told to use."""
    return int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))


def with_fsdp() -> bool:
    """Tell whether `accelerate launch` was told to shard the model."""
    return bool(parse_flag_from_env("ACCELERATE_USE_FSDP"))


def replicated() -> bool:
    """Tell whether several processes hold the whole model each, in torch's DDP."""
    return processes().num_processes > 1 and not with_deepspeed() and not with_fsdp()
