"""Packages under other projects' names, for tests that need a trainer's events and not its weights:
this directory goes into PYTHONPATH.
"""
