"""Finds saves in output directories, pins them, and uploads those that are finished.

The problem: a trainer says nowhere that a checkpoint is whole, and its rotation deletes checkpoints
within minutes.  The idea: scan again and again, link what appears, judge it by its files alone, and
let the store's records decide what is still to be sent; nothing that must survive is kept in
memory.

Read in this order: `scanner` (which saves are here), `pinning` (and `spool_room`: which pins are
dropped when the disk is full), `observation` and `finished` (is a save complete; `torn_saves` has
the rules), `worker` (what is sent, by `store_view` and `records.upload_decision`; `save_state` has
the state of each save), `queue`, `local_save`, `upload`, `upload_sources`.  Beside that lie `push`
(the same for one command), `file_selection` and `model_configs` (which files are sent), `repair`,
`cleanup`, `join`, and `logs` (files beside the checkpoints).  `options`, `node_identity` and
`results` hold the options, the node's id and clock, and the values that are reported.
"""
