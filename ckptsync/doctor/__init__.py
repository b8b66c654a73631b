"""Find what makes a training on several nodes hang or lose files, before it starts.

In reading order: `facts` holds what a node tells of itself and what is found wrong with it; `probe` gathers those facts of a machine and a Python; `checks` is
the table of checks over them, with those of `launch`.  These need the standard library alone.  `training` runs the probe in the Python that trains;
`directories` and `store` try what the worker does on this node; `publishing` exchanges facts through the store; `report` puts it all together.
"""
