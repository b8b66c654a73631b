"""The head merges complete checkpoints, repairs models, and deletes what no rule keeps.

``due_jobs`` (pure) decides what is due: merges, repairs, verifications.

Models: ``consolidate`` makes, repairs and completes them; ``agreement`` records what a
model is made of, so that a head with other options stops.

Retention: ``retention_rules`` and ``retention`` (pure) decide; ``removal`` removes, withdraws or
keeps one location; ``gc`` does it for a store; ``orphans`` finds files that no record names.

``weights_comparison`` compares a new model's weights with those before it.
``repair`` plans what can be done about damage, and does what this machine can do.
"""
