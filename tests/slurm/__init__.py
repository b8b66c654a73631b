"""A training under a real Slurm: `make slurm`.

`cluster`: a controller and two nodes on this machine, each with a host name and a disk of its own.
`train`: the program that is trained there.
"""
