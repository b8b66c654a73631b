"""How each framework spreads tensors over files: one module a framework or format family, and the table of them.

A layout is functions that are given the files of a checkpoint: names, sizes, ranged reads. See CONTRIBUTING.md, *A new layout*.

In reading order:

- `table`: the Protocol of a layout, the table, and what can be known of any checkpoint.
- `names`, `rank_names`: names of files by directory, and by the rank that wrote them.
- `whole`, `whole_bin`, `peft`, `lightning`: models that are not sharded.
- `dcp`: torch's distributed checkpoints; `dcp_metadata` (what they say of themselves), `dcp_sections` (which tensors are the model).
- `dcp_safetensors`: the same in safetensors; `shapes_proof` (what proves that none is missing).
- `per_rank`: a file a rank; `wrapped` (ShardedTensors), `dtensor` (DTensors).
- `zero`: DeepSpeed; `zero_files`, `zero_masters`, `zero_rank`, `zero_pipeline`, `zero_tensor_parallel`.
- `universal`: DeepSpeed's universal checkpoints.
- `refused`: checkpoints that are known and not read.
"""
