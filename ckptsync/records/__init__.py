"""Records: what nodes and heads say about checkpoints, and what the set of them means.

Pure.  ``names``: where things lie in a store, and which names are safe.  ``manifest``, ``seal``, ``report``,
``tombstone``: one record each.  ``coding``: canonical JSON, named by its own bytes.  ``saves``: which manifests belong together.
``state``: facets and the one word.
"""
