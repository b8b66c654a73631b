"""The head: what is complete becomes one model, sealed; what is damaged of it is made again.

``catalogue``: all that a store holds.  ``deciding`` (pure): what is due.  ``checked``: files that are believed only as their manifests say.
``sealing``: making, mending and completing one model.  ``consolidate``: the tick.
"""
