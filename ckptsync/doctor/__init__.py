"""What makes trainings on several nodes hang or lose files, named before they start.

``probe``: what a machine and a training's Python say of themselves, a dict that JSON can hold; also a script for another interpreter (``interpreters``).  ``nodes``: that dict as values.
``compare``: dicts in, ``findings`` out, by ``versions``, ``launching``, ``networking``, ``gpus``, ``machines`` and ``known`` (what one node shows alone).  Up to here the standard library does.

``examining``: this node as the service finds it: ``permissions`` in the store, ``output_dirs``.  ``training``: what a training's own file says.
``publishing``: what nodes say of themselves in a store.
"""
