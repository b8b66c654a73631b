"""Training without any Trainer: DeepSpeed's own loop, accelerate's, and one with torch's FSDP2 and
its distributed checkpoint; the same words as `hf_training`.

It has no hook.  Each step is saved: ``global_step<N>/`` by DeepSpeed (and ``latest`` beside it),
``checkpoint_<N>/`` by accelerate, ``step-<N>/`` by torch.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.campaigns.witness import RANK, Truth, training_parser

os.environ["DS_ACCELERATOR"] = "cpu"
MODES = ("zero1", "zero2", "zero3", "accelerate", "dcp")


def options() -> argparse.Namespace:
    """Those of `hf_training`, as far as they have a meaning here: nobody rotates."""
    parser = training_parser(__doc__, MODES)
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--frozen", action="store_true", help="the first layer is not trained")
    parser.add_argument("--universal", action="store_true", help="what --resume names is universal")
    return parser.parse_args()


OPTIONS = options()

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from tests.campaigns.slow_saving import Slow  # noqa: E402

Save = Callable[[int], None]
Train = Callable[[Any], float]


def deepspeed_loop(model: Any, stage: int) -> tuple[Train, Save]:
    """What trains on a batch, and what saves."""
    import deepspeed

    if OPTIONS.precision == "fp16":  # DeepSpeed says that a CPU has none; torch has it
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    few = {
        "stage3_param_persistence_threshold": 0,
        "reduce_bucket_size": 5000,
        "stage3_prefetch_bucket_size": 5000,
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": OPTIONS.precision == "bf16"},
        "fp16": {"enabled": OPTIONS.precision == "fp16", "initial_scale_power": 8},
        "checkpoint": {"load_universal": OPTIONS.universal},
        "zero_optimization": {"stage": stage, **few, "allgather_bucket_size": 5000},
    }
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config=config,
    )
    if OPTIONS.resume:
        engine.load_checkpoint(str(OPTIONS.resume.parent), tag=OPTIONS.resume.name)

    def train(ids: Any) -> float:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return float(loss)

    return train, lambda step: engine.save_checkpoint(str(OPTIONS.out), tag=f"global_step{step}")


def accelerate_loop(model: Any) -> tuple[Train, Save]:
    """The same with accelerate and DDP."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    if OPTIONS.resume:
        accelerator.load_state(str(OPTIONS.resume))

    def train(ids: Any) -> float:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return float(loss)

    return train, lambda step: accelerator.save_state(str(OPTIONS.out / f"checkpoint_{step}"))


def dcp_loop(model: Any) -> tuple[Train, Save]:
    """The same with FSDP2."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def states() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    if OPTIONS.resume:
        found = states()
        load(found, checkpoint_id=OPTIONS.resume)
        set_state_dict(
            model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
        )

    def train(ids: Any) -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return train, lambda step: save(states(), checkpoint_id=OPTIONS.out / f"step-{step}")


LOOPS: dict[str, Callable[[Any], tuple[Train, Save]]] = {
    "zero1": partial(deepspeed_loop, stage=1),
    "zero2": partial(deepspeed_loop, stage=2),
    "zero3": partial(deepspeed_loop, stage=3),
    "accelerate": accelerate_loop,
    "dcp": dcp_loop,
}
STEMS = {"accelerate": "checkpoint_", "dcp": "step-"}


def trained() -> None:
    """From start to end."""
    truth, stem = Truth(OPTIONS.out, OPTIONS.truth), STEMS.get(OPTIONS.mode, "global_step")
    OPTIONS.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(OPTIONS.base, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (OPTIONS.frozen and "layers.0." in name))
    train, save = LOOPS[OPTIONS.mode](model)
    begin = int("".join(c for c in OPTIONS.resume.name if c.isdigit())) if OPTIONS.resume else 0
    slow = Slow(OPTIONS.slow)
    torch.save = slow.torch_save(torch.save)
    chance = torch.Generator().manual_seed(100 * OPTIONS.flavour + RANK)
    for step in range(begin + 1, OPTIONS.steps + 1):
        truth.say("loss", step, loss=train(torch.randint(4, 70, (1, 16), generator=chance)).hex())
        if step > begin + 1:
            truth.keep(f"{stem}{step - 1}")
            truth.say("gone", step - 1)
        slow.told(save, partial(truth.say, step=step))(step)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    trained()
