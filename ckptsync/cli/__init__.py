"""Words, arguments, tables, exit codes: one file a command, one error boundary (``main``).

``arguments``: the parser, and nothing heavy.  ``main``: the boundary.  A command is a module with ``run(args) -> exit code``, imported
when it is asked for.  ``output``: JSON and aligned tables.  ``progress``: a bar on a terminal, a line now and then elsewhere.
``locations``: a store's checkpoints as values to print.
``demo`` and ``demo_*``: the story, and its pieces.
"""
