"""Read the configuration of the service from a YAML file and the environment into frozen values.

A service must not start with a mistake in its configuration, and a user wants to correct all
mistakes at once.  So every key is declared once, with its type, reader and default, and one error
names every problem with its line.

In reading order: `schema` declares every key.  `value_parsers` reads the value of a key.
`yaml_lines` reads YAML with the line of each key.  `loading` makes a `Config` of file and
environment, and the limits and options that stores take.  `output_dirs` finds the output
directories that the configuration names.
"""
