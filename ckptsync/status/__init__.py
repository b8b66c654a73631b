"""What nodes do now, and what is wrong with them, with their checkpoints and with their store.

A node may be dead, and no service need run when somebody asks what is wrong. So each node writes a
heartbeat into the store. Whoever reads the heartbeats and the catalogue computes from them one
value, the overview, and its alarms; `ckptsync status`, the page and metrics show it.

In reading order: `heartbeat` defines and writes the two files of a node, and detects two workers
with one id. `nodes` reads these files of all nodes. `live_catalogue` adds to a store's catalogue
what its nodes do. `locations` describes locations as plain values, `location_details` one location
in full. `training_curves` has what a trainer logged, `run_status` what each run does. `overview`
computes the overview and the alarms that hold. `alarms` defines an alarm, and decides when it is
sent to people. `metrics` formats a process and the overview for Prometheus.
"""
