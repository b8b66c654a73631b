"""The fleet: ``heartbeat`` is what a node says of itself in the store, and how two workers under one id are told apart."""
