"""The fleet: what nodes say of themselves, and what is wrong with them, their checkpoints and their store.

In reading order: `heartbeat` is a node's regular file in the store, by which two workers under one id are told apart; `facts` is what a node is made of; `nodes`
reads both of all nodes; `runs` makes runs of the catalogue; `alarms` is what an alarm is and `alarm_rules` which ones hold; `overview` is all of it as one
value, which `ckptsync status` and /metrics show; `alerting` decides which alarms to tell somebody, and when.
"""
