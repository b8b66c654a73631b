"""The head: merges complete checkpoints, repairs models, and deletes what no rule keeps.

Any machine may run a head, also several at once, and each may be killed at any moment. So what is
due is decided by pure functions from what the store holds, each piece of work is a command that
decides again before it acts, and records are written last.

`due_jobs` says which merges, repairs and verifications are due. `consolidate` makes a model,
repairs it, or completes its configuration; `agreement` stops a head that would make it of other
inputs; `weights_comparison` compares its weights with the models before it. `repair` plans what can
be done about damage, and does what this machine can do. Retention: `retention_rules` and
`retention` decide what is kept; `removal` marks, removes or keeps one location; `gc` does it for a
store; `orphans` finds and deletes files that no record names.
"""
