"""Merging: a header, and then bytes in order.

Pure: ``tile``, ``cut``, ``cast``, ``dtypes``, ``plan``, ``output``.  Doing: ``copy`` (through a bounded window), ``consolidate``.
"""
