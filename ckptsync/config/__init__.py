"""Configuration: YAML and environment in, frozen values out, all problems at once.

In reading order: `schema` has every key with its type, default and variable; `value_parsers` reads
a key's value; `yaml_lines` reads YAML with the line of each key; `loading` makes a `Config` of file
and environment, and limits and options as stores take them; `output_dirs` finds the output
directories.
"""
