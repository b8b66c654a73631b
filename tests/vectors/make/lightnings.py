"""Lightning on a tiny model: lightnings.py {sharded,file} --reference DIR.

sharded   ModelParallelStrategy: Trainer.save_checkpoint writes out.ckpt/, a DCP of {"state_dict": …, "optimizer_0": …}, with meta.pt beside it
file      one process: ModelCheckpoint writes out/epoch=0-step=2.ckpt, with hyperparameters of classes that no checkpoint needs
"""

from pathlib import Path
from types import SimpleNamespace

import lightning
import torch
from common import WORLD, Tensors, gathered, parser, save_reference
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard


class Tiny(nn.Module):
    """Odd sizes, a tied head, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 5)
        self.hidden = nn.Linear(5, 5)
        self.head = nn.Linear(5, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("table", torch.arange(7, dtype=torch.int32))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.hidden(self.embed(tokens))))


class Module(lightning.LightningModule):
    """The model is an attribute, so that every name begins with "model."."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Tiny()
        self.save_hyperparameters({"data": Path("/data"), "options": SimpleNamespace(lr=0.01)})

    def configure_model(self) -> None:
        if self.device_mesh is None:
            return
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.model.hidden, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(torch.arange(24).reshape(8, 3) % 13, batch_size=1)


def alone() -> Tensors:
    """Trainer.fit with a checkpoint at its end; the state dict."""
    saves = ModelCheckpoint("out", every_n_train_steps=2)
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_steps=2, logger=False, callbacks=[saves], enable_progress_bar=False)
    module = Module()
    trainer.fit(module)
    return module.state_dict()


def trained(world: int) -> Tensors:
    """Trainer.fit, Trainer.save_checkpoint; the state dict, gathered."""
    strategy = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, use_distributed_sampler=True,
    )  # fmt: skip
    module = Module()
    trainer.fit(module)
    trainer.save_checkpoint("out.ckpt")
    return module.state_dict()


def main() -> None:
    """Let the strategy save, gather."""
    options = parser(__doc__, ("sharded", "file")).parse_args()
    state = alone() if options.kind == "file" else trained(WORLD)
    save_reference(options.reference / "full.safetensors", gathered(state))


if __name__ == "__main__":
    main()
