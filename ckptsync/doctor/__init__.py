"""What makes trainings on several nodes hang or lose files, named before they start.  Imports only what is below; ``probe`` and all that compares need nothing but the standard library.

``probe``: what a machine and a training's Python say of themselves, a dict that JSON can hold; also a script for another interpreter.  ``nodes``: that dict as values.
``compare``: dicts in, ``findings`` out, by ``versions``, ``launching``, ``networking``, ``gpus``, ``machines`` and ``known`` (what one node shows alone).
"""
