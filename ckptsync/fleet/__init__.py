"""The fleet: what nodes say of themselves, and what is to be seen of all of it.

``heartbeat``: a node's word about itself in the store, and how two workers under one id are told apart; ``facts``: what a node is made of;
``told``: all of both.  ``nodes`` and ``runs`` make of them, and of the catalogue, what `ckptsync status` shows; ``node_alarms`` and ``location_alarms`` say what of
that is wrong (``scene``: by what they judge; ``alarms``: what an alarm is); ``overview`` is all of it as one value.
``alerting``: which alarms to tell somebody, and when.
"""
