"""The command line: a module for each command, and what commands share.

Users call commands by hand, in scripts and from a head, so every command reads its store, prints
its result and ends in the same way.  A command's module only turns arguments into a call of another
package, and its result into text or JSON.

The module of a command (`main.Command`) has `add_arguments(command)`, which defines the arguments
on the command's parser, and `run(args)`, which does the work, prints the result, and returns the
exit code.  `main` prints every `CkptsyncError` that `run` raises, and returns its exit code.

In reading order: `commands` is the table of commands.  `main` imports the module of the command
that is called, and runs it.  `arguments` has the parser, and how a store and a target in it are
named.  `output` prints JSON, tables and progress.  `progress` prints progress for programs.
`screen` draws the screens of ``--watch``.  `ls` and `ls_run` make the rows that `status` and `demo`
print, too.
"""
