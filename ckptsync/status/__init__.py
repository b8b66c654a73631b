"""What nodes do and what is wrong: with them, with their checkpoints and with their store.

`heartbeat`: the two files of a node in the store, by which two workers of one id are told apart.
`nodes`: these files of all nodes.  `overlay`: a store's catalogue with what they do.  `locations`:
the locations as plain values; `location_details`: one in full.  `curves`: what a trainer logged.
`run_status`: what each run does.  `overview`: everything as one value, which `ckptsync status`, the
page and metrics show, and which alarms hold.  `alarms`: what an alarm is, and when it is sent to
somebody.  `metrics`: a process and the overview, for Prometheus.
"""
