"""Containers of tensors, read and never run.

What frameworks put into them is the business of `ckptsync.layouts`.

In reading order:

- `dtypes`: element types, and torch's names for them.
- `safetensors`: headers, read and written.
- `pickles`: a machine that reads a pickle as plain values.
- `torch_pickle`: tensors in pickles.
- `torch_zip`: the zip archive of ``torch.save``.
- `torch_save`: a file of ``torch.save``, in today's container or the legacy one.
- `torch_archive`: the zip archive, written.
"""
