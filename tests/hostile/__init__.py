"""Attacks, kept as code: files that nobody should have to trust, and what the program must answer
to each.

``attack`` is the noun; ``pickles``, ``zips``, ``headers`` and ``names`` build them; ``running``
lets every one of them loose in a process of its own, with little memory and little time.  A new
attack is a function, or a row of a table, in one of these.
"""
