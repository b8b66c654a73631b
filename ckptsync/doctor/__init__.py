"""Find what makes a training on several nodes hang or lose files, before it starts.

Facts are gathered on each node, in the Python that trains; pure checks judge the facts of all
nodes, which meet in the store.

In reading order: `findings` has one fault, `facts` the parsed facts of a node. `probe` gathers
them on a machine. `checks` has the tables of checks over facts, with the launch's in
`launch_checks`. These five import the standard library alone. `training_facts` runs the probe in
the Python that trains, and reads the training's file, or its script by `launch_scripts`.
`directory_checks` and `store_checks` try on this node what the worker does. `published_facts`
exchanges facts through the store. `diagnosis` is the entry point: it examines this node, or
compares the nodes of a store.
"""
