"""Configuration: YAML and environment in, frozen values out, all problems at once.

``units``: durations and sizes as people write them, pure.  ``values``: the frozen values.  ``settings``: the table of every
key, how it is read and its default.  ``loading``: file and environment → `Config`.
``reach``: limits as stores want them.  ``runs``: which output directories are there now.  ``yaml_lines``: YAML with the line of each key.
"""
