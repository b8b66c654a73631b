"""Run a training from the newest checkpoint that all of its nodes can resume from.

The nodes of a training must begin with the same save, and share nothing but the store.  Each node
writes there what it could begin with; then each chooses by the same records, gets the checkpoint,
and waits until all nodes have it.

In reading order: `attempt`: which start of a training this is, and of how many nodes.  `choose`:
the newest save that all nodes could begin with.  `attempt_records`: what nodes write in the store
about an attempt.  `local_checkpoints`: which checkpoints of the output directory are whole, and
which are moved aside.  `prepare`: the whole agreement of one node, with the download.

Then: `training_command`: the training's command and environment.  `training`: its process and its
signals.  `drain`: what of an output directory the store has, and the wait for the rest.
"""
