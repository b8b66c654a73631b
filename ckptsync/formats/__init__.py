"""Read, and write, the containers in which frameworks keep tensors: safetensors and ``torch.save``.

A checkpoint may be larger than memory, and its pickles could run any code. So each module finds
where the bytes of a tensor lie in a file, as extents, without reading them and without running
code. Which file holds which tensor of a model is the subject of `ckptsync.layouts`. The entry
points are `safetensors.tensors` and `torch_save.load`.

In reading order:

- `dtypes`: element types, and torch's names for them.
- `safetensors`: headers, read and written.
- `pickles`: a machine that reads a pickle as plain values.
- `torch_pickle`: tensors in pickles.
- `torch_zip`: the zip archive of ``torch.save``.
- `torch_save`: a file of ``torch.save``, in today's container or the legacy one.
- `torch_archive`: the zip archive, written.
"""
