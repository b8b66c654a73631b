"""Words, arguments, tables, exit codes: one file a command, one error boundary (``main``)."""
