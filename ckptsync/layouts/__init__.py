"""Read models from the files of each framework: a module for each, and their registry.

A layout is functions that are given the files of a checkpoint: names, sizes, ranged reads. See
CONTRIBUTING.md, *A new layout*.

In reading order:

- `registry`: the Protocol of a layout, their table, and what can be known of any checkpoint.
- `file_names`: what names of files say: their kind and use, their rank, their directory.
- `state_dict`: which entries of a module's state dict are weights.
- `whole_safetensors`, `whole_bin`, `peft`, `lightning`: models that are not sharded.
- `dcp`: torch's distributed checkpoints; `dcp_metadata` is what they say of themselves.
- `dcp_safetensors`: the same in safetensors; `config_shapes` (shapes that a ``config.json``
  implies).
- `per_rank`: a file a rank; `sharded_tensors` is what one has of the tensors of FSDP1 and FSDP2.
- `zero`: DeepSpeed; `zero_files`, `zero_partitions` (where masters lie), `zero_tensor_parallel`.
- `zero_universal`: DeepSpeed's universal checkpoints.
- `zero_optimizer_states`: what a training with ZeRO goes on from, whole.
- `weight_renaming`: where a file's tensors are in memory, by the table of `weight_renaming_table`.
- `known_unsupported`: checkpoints that are known and not read.
"""
