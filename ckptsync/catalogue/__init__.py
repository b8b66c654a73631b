"""The catalogue: ``reading`` tells what a store holds, of every location the little that decisions, lists and alarms need (``summary``).

``fresh`` gives one location, or all of a run, with every record and name, as who writes or proves needs it.
"""
