"""Records: what nodes, heads and people say about checkpoints, and what the set of them means.

``store_paths``: where things lie in a store, and which names are safe.  ``manifest``,
``model_record``, ``weights_record``, ``report``, ``save_decisions``, ``event_record``: the
records.  ``layer_groups``: the group of layers of a tensor, by its name.  ``io``: canonical JSON,
named by its own bytes, checked, written to a store and read from it.  ``same_save``: whether two
manifests are of one save; ``manifest_groups``: which saves there are, and the location of each;
``upload_decision``: what a node still has to send, where to, and whether it may.
``save_order``: which of them is newer.  ``location_status``: conditions and the status of each.
``weights_findings``: what looks wrong in weights, compared with those before.
``progress``: what a node does with one now, an entry of its heartbeat.
All but ``io`` is pure.
"""
