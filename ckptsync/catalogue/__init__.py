"""What a store holds: ``cached``, in short (``location_summary``), for decisions, lists and alarms.

``uncached`` is for whoever writes or deletes; ``unnamed_files`` finds what no record names.
``child_job``: the work on a location that a head or a verifier gives to a child process.
"""
