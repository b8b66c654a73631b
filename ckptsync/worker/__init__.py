"""The worker finds saves in output directories, pins them, and uploads those that are finished.

Read in this order: `scanner` (what is here), `pinning` (`spool_room`: what gives way in a full
spool), `observation` and `finished` (is it a whole save; `torn_saves` has the rules), `worker`
(what is sent, by `store_view` and `records.upload_decision`; where each save stands is a value of
`save_state`), `queue`, `local_save`, `upload`, `upload_sources`.  Beside that way lie
`push` (the same for one command), `file_selection` and `model_configs` (which files are sent),
`repair`, `cleanup`, `join`, and `logs` (files beside the checkpoints). `options`, `node_identity`
and `results` hold what goes in and what is reported.
"""
