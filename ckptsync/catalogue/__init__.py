"""The catalogue: what a store holds, a summary for each location of each run.

A store has no index, so listings and records are all there is, and reading 10,000 checkpoints at
each cycle of a head would be too slow. So each location is summarized once (`location_summary`),
and summaries are cached by the listing of their records.

`cached` reads the catalogue, for decisions, lists and alarms. `uncached` reads full states anew,
for whoever writes or deletes. `unnamed_files` finds files that no record names.
"""
