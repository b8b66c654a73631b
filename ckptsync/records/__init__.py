"""Records: what nodes, heads and people say about checkpoints, and what follows from them.

A store has no database and no locks, so every fact is a small JSON file of its own, which is
written once. What a set of records means is decided by pure functions: whoever has read the same
records decides the same. Only `io` reads and writes a store.

Begin with `store_paths` (where files lie, which names are safe) and the records themselves:
`manifest`, `model_record`, `weights_record`, `report`, `save_decisions` (tombstone, keep, join),
`event_record`; `progress` is an entry of a heartbeat. `io` encodes, names, checks, writes and reads
them.

What follows from them: `same_save` (are two manifests of one save), `manifest_groups` (which
manifests are one save, and in which location it belongs), `save_order` (which save is newer),
`upload_decision` (what a node still has to send, and where), `location_status` (the conditions and
the status of a location), `layer_groups` and `weights_findings` (what looks wrong in the weights of
a model).
"""
