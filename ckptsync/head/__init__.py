"""The head: what is complete becomes one model, sealed; what is damaged of it is made again.

``deciding`` (pure): what is due.  ``checked``: files that are believed only as their manifests say.
``sealing``: making, mending and completing one model.  ``consolidate``: the tick.
"""
