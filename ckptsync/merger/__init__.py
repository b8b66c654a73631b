"""Merging a sharded checkpoint into safetensors, in four steps.

1. Open what the user named, and check that it is one save: `inputs`, `file_times`; several models
   are read as one through `joined_files`.
2. Plan: `prepare` reads the layout's tensors and decides names (`tensor_names`, `model_prefix`,
   `adapter`), leaves out what is no weight (`non_model_tensors`), compares with the configuration
   (`completeness`), copies (`copy_consistency`) and the base model (`base_comparison`), and chooses
   what stands beside the weights (`model_files`).  `plan` cuts output files.
3. Stream: `engine` makes and writes all files, by threads or by `ray_engine`: `read_units` gathers,
   `cast` casts, `tensor_statistics` counts.  `readers` draws and builds what lies below: digests
   (`checked_files`), CRC32s (`container_crcs`), replicas (`copy_consistency`).
   Of another model: `name_mapping` relates its names and fills from it, `tensor_pieces` splits and
   fuses tensors.  An adapter into its base: `adapter_changes` decides what becomes of each tensor
   (`change_types`), by its configuration (`adapter_config`), names (`adapter_names`), factors
   (`adapter_factors`) and tied embeddings (`adapter_ties`); `into_base` plans that merge,
   `adapter_sums` sums.
4. Publish: `destination` is a new directory or a store.

`inspection` says of each set of weights what a merge would.
`universal_conversion` plans DeepSpeed's universal form instead of a model.
`model_differences` compares two planned models by step 3, and publishes nothing.
"""
