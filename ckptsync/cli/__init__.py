"""The commands: a module each, with its arguments and ``run(args) -> exit code``.

In reading order: `main` holds the table of commands, imports the one that is called, and turns its
errors into exit codes; `arguments` has the parser, and opens the store that a command line names;
`output` prints JSON, tables and progress.  `ls` makes the rows that `status` and `demo` show, too.
"""
