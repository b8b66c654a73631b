"""The catalogue: ``reading`` tells what a store holds, of every place the little that decisions, lists and alarms need (``summary``).

``fresh`` gives one place, or all of a run, with every record and name, as who writes or proves needs it.
"""
