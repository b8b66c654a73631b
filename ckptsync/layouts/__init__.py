"""Find a model's tensors in the checkpoint of any framework, without reading their bytes.

Every framework spreads a model over files in a way of its own. So a layout is a module of pure
functions for one framework. It gets the files of a checkpoint (names, sizes, ranged reads) and
returns tensors made of extents, so that a merge only copies bytes. The entry points are
`registry.sources`, `choose`, `tensors` and `demands`. CONTRIBUTING.md, *A new layout*, says how to
add one.

In reading order:

- `registry`: the Protocol of a layout, their table, and what can be known of any checkpoint.
- `file_names`: the kind and use of a file, its rank and its directory, by its name.
- `state_dict`: which entries of a module's state dict are weights.
- `whole_safetensors`, `whole_bin`, `peft`, `lightning`: models that are not sharded.
- `dcp`: torch's distributed checkpoints; `dcp_metadata` reads their metadata.
- `dcp_safetensors`: the same in safetensors; `config_shapes`: shapes implied by a ``config.json``.
- `per_rank`: one file a rank; `sharded_tensors`: a rank's part of the tensors of FSDP1 and FSDP2.
- `zero`: DeepSpeed; `zero_files`, `zero_partitions` (where masters lie), `zero_tensor_parallel`.
- `zero_universal`: DeepSpeed's universal checkpoints.
- `zero_optimizer_states`: the masters and optimizer states that a training with ZeRO resumes from.
- `weight_renaming`: where a file's tensors are in memory, by `weight_renaming_table`.
- `known_unsupported`: checkpoints that are recognised and not read.
"""
