"""What a store holds: ``cached``, in short (``location_summary``), for decisions, lists and alarms.

``uncached`` is for whoever writes or deletes; ``unnamed_files`` finds what no record names.
"""
