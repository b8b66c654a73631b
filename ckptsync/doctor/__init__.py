"""Find what makes a training on several nodes hang or lose files, before it starts.

In reading order: `findings` is what is found wrong, `facts` what a node tells of itself; `probe`
gathers those facts of a machine and a Python; `checks` is the table of checks over them, with those
of `launch_checks`. These need the standard library alone. `training_facts` runs the probe in the
Python that trains, and reads the training's file, or its script by `launch_scripts`;
`directory_checks` and `store_checks` try what the worker does on this node; `published_facts`
exchanges facts through the store; `diagnosis` puts it all together.
"""
