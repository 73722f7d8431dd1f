"""The processes that train together."""

import os

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, parse_flag_from_env, reduce
from torch import Tensor


def processes() -> PartialState:
    """Return accelerate's state of this process; without an accelerator, the processes run on the CPU."""
    return PartialState(cpu=not torch.accelerator.is_available())


def summed(values: Tensor) -> Tensor:
    """Sum a tensor on the CPU over all processes; all of them call this."""
    state = processes()
    return reduce(values.to(state.device), "sum").cpu() if state.num_processes > 1 else values


def with_deepspeed() -> bool:
    """Whether `accelerate launch` was configured for DeepSpeed."""
    return bool(parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"))


def with_fsdp() -> bool:
    """Whether `accelerate launch` was configured for FSDP."""
    return bool(parse_flag_from_env("ACCELERATE_USE_FSDP"))


def replicated() -> bool:
    """Whether each process holds the whole model (DDP), even if only one process was launched."""
    launched = processes().distributed_type != DistributedType.NO
    return launched and not with_deepspeed() and not with_fsdp()


def require_sharded_checkpoints() -> None:
    """Raise `ValueError` if FSDP was configured for full checkpoints."""
    if os.environ.get("FSDP_STATE_DICT_TYPE") == "FULL_STATE_DICT" and with_fsdp():
        raise ValueError(
            "Under FSDP, set fsdp_state_dict_type to SHARDED_STATE_DICT: full checkpoints cannot be written"
        )
