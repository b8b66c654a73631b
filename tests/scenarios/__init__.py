"""Black-box scenarios: what a user does, and what he must see.

They use the commands, their exit codes and `--json`, configuration files, signals, the public
hooks, and the files of a store. They know no module of the package, so that they hold whatever it
looks like inside.
"""
