"""Download a checkpoint or a consolidated model, so that a training can resume from it.

A trainer takes any directory of the right name for a checkpoint, so a download must appear whole or
not at all, and survive a kill. So everything is planned from records first, and then downloaded
into a hidden directory, which is renamed at the end.

`find` finds what a user names: `choose` says which checkpoint, `download_plan` which files.
`download` downloads them. `logs` downloads the logs of a run.
"""
