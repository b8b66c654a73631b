"""Agree with a training's other nodes on one checkpoint, and get it, before the training begins.

``attempt``: which attempt of a training this is, and how many nodes it has.  ``choose``: the one
save that all nodes begin with.  ``prepare``: what a node could begin with, the others' answers, and
getting the checkpoint.
"""
