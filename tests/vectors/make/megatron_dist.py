"""Megatron-Core's GPTModel, saved by its dist_checkpointing: megatron_dist.py [--tensor-parallel N] [--tied] --reference DIR.

Ranks are tensor-parallel; iter_0000002/ has common.pt, metadata.json and a DCP whose names have no prefix, beside
"optimizer.state.…". The reference is what torch's reader, which mcore's is, gathers of it, without the optimizer's.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import RANK, WORLD, finish, parser, save_reference
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig


def model(tied: bool) -> GPTModel:
    """Two layers, grouped heads, SwiGLU."""
    config = TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=12, use_cpu_initialization=True,
        gated_linear_unit=True, add_bias_linear=False, activation_func=torch.nn.functional.silu, normalization="RMSNorm",
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(), perform_initialization=True,
        bias_dropout_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False, bias_activation_fusion=False,
        apply_rope_fusion=False, persist_layer_norm=False, pipeline_dtype=torch.float32,
    )  # fmt: skip
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=20,
        max_sequence_length=16,
        share_embeddings_and_output_weights=tied,
    )


def optimizer_states(weights: dict[str, Any]) -> dict[str, Any]:
    """As `Float16OptimizerWithFloat16Params.sharded_state_dict` names them; moments that equal the weights' shapes."""
    found = {}
    for kind in ("exp_avg",):
        for key, tensor in weights.items():
            if isinstance(tensor, ShardedTensor):
                found[f"{kind}.{key}"] = make_sharded_optimizer_tensor(
                    tensor, torch.rand_like(tensor.data.float()), prefix=f"optimizer.state.{kind}"
                )
    return found


def main() -> None:
    """Build, save, load plainly."""
    words = parser(__doc__)
    words.add_argument("--tensor-parallel", type=int, default=WORLD)
    words.add_argument("--tied", action="store_true")
    options = words.parse_args()
    torch.cuda.synchronize = lambda *_: None  # these two are all that keep its writer from a CPU
    torch.cuda.current_device = lambda: "cpu"
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=options.tensor_parallel)
    torch.manual_seed(0)
    sharded = model(options.tied).sharded_state_dict(
        metadata={"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    )
    state: dict[str, Any] = {
        "model": sharded,
        "optimizer": optimizer_states(sharded),
        "rng_state": ShardedObject("rng_state", [{"seed": RANK}], (1, 1, WORLD), (0, 0, RANK), replica_id=0),
        "extra": ShardedTensor.from_rank_offsets("stacked.weight", torch.randn(3, 5), (0, RANK, WORLD), prepend_axis_num=1),
        "iteration": 2,
        "checkpoint_version": 3.0,
        "args": {"hidden_size": 8},
    }
    folder = "out/iter_0000002"
    if RANK == 0:
        os.makedirs(folder)
        Path("out/latest_checkpointed_iteration.txt").write_text("2")
    dist.barrier()
    dist_checkpointing.save(state, folder, validate_access_integrity=True)
    dist.barrier()
    if RANK == 0:
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

        full: dict[str, Any] = {}
        metadata = FileSystemReader(folder).read_metadata()
        for name, told in metadata.state_dict_metadata.items():
            if hasattr(told, "size") and not name.startswith("optimizer."):
                full[name] = torch.empty(told.size, dtype=told.properties.dtype)
        _load_state_dict(full, FileSystemReader(folder), no_dist=True)
        save_reference(options.reference / "full.safetensors", full)
    finish()


if __name__ == "__main__":
    main()
