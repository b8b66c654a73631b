"""The verifier: levels (stat, digest, parse, load), findings, reports."""
