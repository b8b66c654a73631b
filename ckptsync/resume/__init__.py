"""Agree with a training's other nodes on one checkpoint, get it, run the training, and drain it.

Before the training begins: `attempt`: which attempt of a training this is, and how many nodes it
has.  `records`: what nodes write of an attempt in the store.  `local`: what lies in the output
directory.  `choose`: the one save that all nodes begin with.  `prepare`: what a node could begin
with, the others' answers, and getting the checkpoint.

Then: `arguments`: what the command gets.  `training`: the process and its signals.  `drain`:
what of an output directory the store has.
"""
