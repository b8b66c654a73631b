"""The head merges complete checkpoints, repairs models, and deletes what no rule keeps.

Models: ``schedule`` (pure) decides what is due, ``agreement`` of what heads make a model,
``consolidate`` makes, repairs and completes it, out of ``checked_files``.  Retention: ``rules`` and
``retention`` (pure) decide, ``removal`` removes, withdraws or keeps one location, ``gc`` does it
for a store; ``orphans``: files that no record names.  ``repair`` plans what can
be done about damage, and does what can be done here.
"""
