"""Read models from the files of each framework: a module for each, and their registry.

A layout is functions that are given the files of a checkpoint: names, sizes, ranged reads. See
CONTRIBUTING.md, *A new layout*.

In reading order:

- `registry`: the Protocol of a layout, their table, and what can be known of any checkpoint.
- `file_names`: what names of files say: directory, rank, whether they belong to the model.
- `whole_safetensors`, `whole_bin`, `peft`, `lightning`: models that are not sharded.
- `dcp`: torch's distributed checkpoints; `dcp_metadata` (what they say of themselves),
  `dcp_state_dict` (which tensors are the model).
- `dcp_safetensors`: the same in safetensors; `global_shapes` (which shapes tensors must have),
  `config_shapes` (those that a ``config.json`` implies).
- `per_rank`: a file a rank; `sharded_tensor` (of FSDP1), `dtensor` (of FSDP2).
- `zero`: DeepSpeed; `zero_files`, `zero_weights`, `zero_agreement`, `zero_mp_rank`,
  `zero_partitions`, `zero_experts`, `zero_pipeline`, `zero_tensor_parallel`.
- `zero_universal`, `zero_universal_weights`: DeepSpeed's universal checkpoints.
- `known_unsupported`: checkpoints that are known and not read.
"""
