"""The commands: a module each, with its arguments and ``run(args) -> exit code``.

In reading order: `commands` is the table of commands; `main` imports the one that is called, and
turns its errors into exit codes; `arguments` is their grammar: the parser, how a store is named and
opened, and what in it a command acts on; `output` prints JSON, tables and progress; `screen` draws
the pictures of ``--watch``.  `ls` makes the rows that `status` and `demo` show, too.
"""
