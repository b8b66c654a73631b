"""Merge a sharded checkpoint into safetensors that `from_pretrained` opens.

Every trainer spreads a model's tensors over files in a way of its own.  `ckptsync.layouts` says
where the bytes of each tensor lie; this package plans from that which bytes each output file has,
and copies them as a stream.  So memory does not grow with the model, and neither torch nor the
model's class is needed.  The entry points, in the order of a merge:

1. `inputs` opens what the user named, and checks that it is one save (`file_times`).  Several
   models are read as one through `joined_files`.
2. `prepare` plans: it reads the layout's tensors and decides their names (`tensor_names`,
   `model_prefix`, `adapter`), leaves out what is no weight (`non_model_tensors`), compares with the
   configuration (`completeness`), with other copies (`copy_consistency`) and with the base model
   (`base_comparison`), and chooses the files beside the weights (`model_files`).  `plan` decides
   which tensors each output file has.
3. `engine` writes all files with threads, `ray_engine` with tasks of a cluster: `read_units`
   gathers bytes, `cast` casts them, `tensor_statistics` counts values.  `readers` draws the layers
   that are read through: digests (`checked_files`), CRC32s (`container_crcs`), replicas
   (`copy_consistency`).
4. `destination` publishes the model as a new directory or in a store.

`--names-of` and `--fill-from` relate a checkpoint to a model's files: `name_mapping` finds the
relation, `tensor_pieces` splits and fuses tensors.

`--into` sums adapters into their base: `into_base` plans that merge, `adapter_changes` decides what
becomes of each tensor (`change_types`), from the adapter's configuration (`adapter_config`), names
(`adapter_names`), factors (`adapter_factors`) and tied embeddings (`adapter_ties`); `adapter_sums`
computes the sums while the base is written.

`inspection` says of each set of weights whether it can be merged.  `universal_conversion` plans
DeepSpeed's universal form instead of a model.  `model_differences` compares two planned models, and
publishes nothing.
"""
