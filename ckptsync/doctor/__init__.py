"""Find what makes a training on several nodes hang or lose files, before it starts.

``probe`` gathers the facts of a machine and of the Python that trains, as JSON; ``interpreters`` runs it in that Python.  ``nodes`` reads facts as values.
``compare`` is the table of checks: facts in, ``findings`` out.  The checks are in ``launch``, ``machines`` and ``versions``.  All of these need the standard library alone.

``examining`` checks this node as the service uses it: the store (``permissions``), the ``output_dirs`` and their file systems (``mounting``).  ``training`` reads the training's own file.
``publishing`` writes facts and findings to a store, and waits for the other nodes.
"""
