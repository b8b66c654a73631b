"""The commands: a module each, with its arguments and ``run(args) -> exit code``.

One error boundary (`main`).

In reading order: `main` holds the table of commands, which imports only the command that is called;
`arguments` the parser; `access` opens the store that a command line names; `output` prints JSON,
tables and progress.  `ls` makes the rows that `status` and `demo` show, too; `systemd_units` the
text that `service` writes.
"""
