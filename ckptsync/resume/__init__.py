"""Agree with a training's other nodes on one checkpoint, and get it, before the training begins.

``attempt``: which attempt of a training this is, and how many nodes it has.  ``choose``: the one
save that all nodes begin with.  ``local``: what is whole in the output directory, and what goes
aside.  ``records``: what nodes tell each other through a store.  ``prepare``: a node's way through
an attempt.
"""
