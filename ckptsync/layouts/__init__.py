"""How each framework spreads tensors over files, one module a layout (or some, under its prefix), and the table of them.

Pure functions that are given the files of a checkpoint: names, sizes, ranged reads.  See CONTRIBUTING.md, *A new layout*.
"""
