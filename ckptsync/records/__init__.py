"""Records: what nodes and heads say about checkpoints, and what the set of them means.

Pure.  ``names``: where things lie in a store, and which names are safe.  ``manifest``, ``model_record``, ``report``, ``tombstone``, ``keep``, ``join``: one
record each, and what all of one kind say together.  ``coding``: canonical JSON, named by its own bytes, and what must hold beyond types.  ``sameness``:
whether two manifests are of one save.  ``saves``: which manifests belong together, in which location, and where their files lie.  ``state``: conditions
and the status.  ``locations``: all of that for everything in a listing.  ``vanished``: manifests that others name and that are gone.
"""
