"""Configuration: YAML and environment in, frozen values out, all problems at once.

``units``: durations and sizes as people write them, pure.  ``values``: the frozen values.  ``readers``: how a value is read; ``readers_head``: one of
retention, alerts and metrics.  ``settings``: the table of every key and its default.  ``loading``: file and environment → `Config`.
``reach``: limits as stores want them.  ``runs``: which output directories are there now.  ``yaml_lines``: YAML with the line of each key.
"""
