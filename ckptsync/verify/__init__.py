"""The verifier: levels (stat, digest, parse, load), findings, reports.

``location`` and ``plain`` verify a location in a store and a plain directory; ``reporting`` writes what was found; ``due`` (pure) and ``tick`` decide what is verified when.
Below them, by level: ``stat`` (pure), ``reading`` and ``ranges`` (pure), ``naming``, ``structure``, ``loading`` and its ``child``,
the only module that imports safetensors and torch.
"""
