"""The head: what is complete becomes one model, consolidated; what is damaged of it is made again.

``deciding`` (pure): what is due.  ``checked``: files that are believed only as their manifests say.
``sealing``: making, mending and completing one model.  ``consolidate``: the tick.

What is kept: ``rules``, ``retaining`` and ``marking`` (pure) decide, by ``metrics`` too; ``tombs`` says it, ``removing`` and ``clearing`` do it, ``gc``: the
tick; ``keeping``: by hand; ``litter``: what nothing speaks of.  Repair: ``repairing`` (pure) plans, ``mending`` does what can be done here.
"""
