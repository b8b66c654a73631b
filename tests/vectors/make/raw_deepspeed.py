"""DeepSpeed without a trainer: raw_deepspeed.py STAGE --base DIR --reference DIR [--bf16] [--frozen] [--odd] ...

Writes out/global_step2 and out/latest in the working directory, and three files to REFERENCE:
fp32_master.safetensors   what the checkpoint stores: the fp32 master of what is trained, the rest in its own dtype
model_dtype.safetensors   what the module holds
engine.json               the class of the optimizer
"""

import argparse
import json
import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from common import RANK, Tensors, batch, finish, parser, save_reference
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn
from transformers import AutoModelForCausalLM


class Odd(nn.Module):
    """Buffers of every sort, parameters smaller than the world, and no size that three divides."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 11)
        self.head = nn.Linear(11, 5, bias=False)
        self.pair = nn.Parameter(torch.tensor([0.5, -1.5]))
        self.single = nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("counts", torch.arange(-2, 3))
        self.register_buffer("seen", torch.tensor(2**40 + 1))
        self.register_buffer("temperature", torch.tensor(0.7))
        self.register_buffer("mean", torch.linspace(-1, 1, 11))
        self.register_buffer("mask", torch.tensor([[True, False, True], [False, False, True]]))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return a number that every parameter has a hand in."""
        hidden = torch.tanh(self.inner(inputs.to(self.inner.weight.dtype)) - self.mean) * self.single + self.pair.sum()
        return self.head((hidden / self.temperature).to(self.head.weight.dtype)).float().square().mean()


def config(options: argparse.Namespace) -> dict[str, object]:
    """Return DeepSpeed's configuration."""
    zero: dict[str, object] = {
        "stage": options.stage,
        "stage3_param_persistence_threshold": 0,
        "reduce_bucket_size": 1500,
        "stage3_prefetch_bucket_size": 1500,
        "allgather_bucket_size": 1500,
    }
    if options.sub_group_size:
        zero["sub_group_size"] = options.sub_group_size
    made: dict[str, object] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "bf16": {"enabled": options.bf16},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    if options.round_robin:
        zero |= {"round_robin_gradients": True, "parameter_alignment": True}
    if options.dealt:
        zero["round_robin_gradients"] = True
    if options.accumulate_fp32:
        made["data_types"] = {"grad_accum_dtype": "fp32"}
    return made


def module_of(options: argparse.Namespace) -> nn.Module:
    """Return the module to train, part of it frozen if so asked."""
    if options.odd:
        return Odd()
    model = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if options.frozen and ("embed_tokens" in name or "layers.0." in name):
            parameter.requires_grad_(requires_grad=False)
    return model


def loss_of(engine: deepspeed.DeepSpeedEngine, generator: torch.Generator, options: argparse.Namespace) -> torch.Tensor:
    """Return the loss of a batch of this rank's own."""
    if options.odd:
        inputs = torch.randn(4, 7, generator=generator)
        return engine(inputs)
    ids = batch(generator, rows=1)
    return engine(input_ids=ids, labels=ids).loss


def gather(engine: deepspeed.DeepSpeedEngine) -> tuple[Tensors, Tensors]:
    """Let DeepSpeed's runtime put the master copy and the module's copy together; a collective."""
    master, held = {}, {}
    for name, parameter in engine.module.named_parameters():
        value = safe_get_full_fp32_param(parameter) if parameter.requires_grad else None
        with deepspeed.zero.GatheredParameters([parameter], enabled=engine.zero_optimization_stage() == 3):
            held[name] = parameter.detach().clone().cpu()
        master[name] = held[name] if value is None else value.detach().float().cpu().view(held[name].shape).clone()
    persistent = engine.module.state_dict().keys()
    for name, buffer in engine.module.named_buffers():
        if name in persistent:
            master[name] = held[name] = buffer.detach().clone().cpu()
    return master, held


def parse() -> argparse.Namespace:
    """Read the command line."""
    words = parser(__doc__)
    words.add_argument("stage", type=int)
    words.add_argument("--bf16", action="store_true")
    words.add_argument("--frozen", action="store_true", help="freeze the embedding and layer 0")
    words.add_argument("--odd", action="store_true", help="train Odd, not the base model")
    words.add_argument("--accumulate-fp32", action="store_true", help="at stage 1 with bf16 this selects BF16_Optimizer")
    words.add_argument("--sub-group-size", type=int)
    words.add_argument("--round-robin", action="store_true", help="reorder the params of a group, and align each")
    words.add_argument("--dealt", action="store_true", help="reorder the params of a group, and no more")
    return words.parse_args()


def main() -> None:
    """Train two steps, save at the last, gather."""
    options = parse()
    torch.manual_seed(0)
    deepspeed.init_distributed("gloo")
    model = module_of(options)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config(options))
    generator = torch.Generator().manual_seed(RANK)
    for _ in range(2):
        engine.backward(loss_of(engine, generator, options))
        engine.step()
    engine.save_checkpoint("out", client_state={"custom": {"step": 2, "note": "client state"}})
    master, held = gather(engine)
    if options.dealt and RANK == 0:  # then the runtime's own way to the masters looks for them where they are not
        found = get_fp32_state_dict_from_zero_checkpoint("out")
        master |= {name: found[name].contiguous() for name, _ in engine.module.named_parameters()}
    save_reference(options.reference / "fp32_master.safetensors", master)
    save_reference(options.reference / "model_dtype.safetensors", held)
    if RANK == 0:
        cls = type(engine.optimizer)
        (options.reference / "engine.json").write_text(json.dumps({"optimizer_class": f"{cls.__module__}.{cls.__qualname__}"}))
    finish()


if __name__ == "__main__":
    main()
