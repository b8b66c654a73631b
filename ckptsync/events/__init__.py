"""Events of a head: what happens to locations starts commands, or calls URLs.

``definitions``: what a configuration defines, and how it is read.  ``due``: what happened to a
location, and what is due about it (pure).  ``handling``: run one event, and remember that in the
store.  ``programs``: a command within its limits; a POST.
"""
