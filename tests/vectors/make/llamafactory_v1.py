"""LLaMA-Factory v1's own trainer, one process: llamafactory_v1.py --base DIR --reference DIR writes out/checkpoint-2, whose model lies in ``model``."""

import json
from pathlib import Path

from common import parser, save_reference
from llamafactory.v1.accelerator.interface import DistributedInterface
from llamafactory.v1.config import get_args
from llamafactory.v1.core.data_engine import DataEngine
from llamafactory.v1.core.model_engine import ModelEngine
from llamafactory.v1.trainers.sft_trainer import SFTTrainer


def main() -> None:
    """What its ``run_sft`` does, and the state dict that was saved."""
    options = parser(__doc__).parse_args()
    model, data, training, _ = get_args(told(options.base))
    DistributedInterface(training.dist_config)
    engine = ModelEngine(model, is_train=True)
    trainer = SFTTrainer(args=training, model=engine.model, renderer=engine.renderer, train_dataset=DataEngine(data.train_dataset))
    trainer.fit()
    save_reference(options.reference / "full.safetensors", trainer.model.state_dict())


def told(base: Path) -> dict[str, object]:
    """Arguments, beside a dataset that says one thing."""
    says = [("user", "the of and", 0.0), ("assistant", "to in is it", 1.0)]
    messages = [{"role": role, "content": [{"type": "text", "value": text}], "loss_weight": weight} for role, text, weight in says]
    Path("said.json").write_text(json.dumps([{"messages": messages}] * 8))
    Path("said.yaml").write_text(f"said:\n  path: {Path('said.json').absolute()}\n  source: local\n")
    steps = {"micro_batch_size": 1, "max_steps": 2, "save_steps": 2, "cutoff_len": 64, "batching_workers": 0}
    plain = {"bf16": False, "enable_activation_checkpointing": False, "template": "chatml"}
    return {"model": str(base.absolute()), "train_dataset": "said.yaml", "output_dir": "out", **steps, **plain}


if __name__ == "__main__":
    main()
