"""Events of a head: what happens to a location starts a command, or calls a URL.

Several heads may watch one store, and each may be killed. So what has happened is read from
records, and a further record says what was done about it: an event is due until such a record
exists, whichever head writes it.

`definitions`: the events of a configuration, and how they are read. `due`: what happened to a
location, and which event is due (pure). `handling`: claim one event, run it, write its record.
`programs`: a command within its limits; a POST.
"""
