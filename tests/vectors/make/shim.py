"""Let accelerate run FSDP on a CPU.

accelerate allows FSDP only where the distributed type is MULTI_GPU, MULTI_NPU and so on, never MULTI_CPU. Importing this
makes it believe in MULTI_GPU while the device is the CPU and the backend gloo. Nothing in the saving code is touched.
"""

import os

os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"

import accelerate.state as accelerate_state
import torch
from accelerate.utils import DistributedType


def _prepare_backend(_self: object, *_args: object, **_kwargs: object) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_GPU


def _set_device(self: accelerate_state.PartialState) -> None:
    self.device = torch.device("cpu")


accelerate_state.PartialState._prepare_backend = _prepare_backend
accelerate_state.PartialState.set_device = _set_device
