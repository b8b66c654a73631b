"""The worker: find, pin, settle, digest, send; and send again what a report calls damaged."""
