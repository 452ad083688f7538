"""``mesh chaos``: break a mesh under load and check every token that its clients read.

command      flags
settings     what to break, how often, in which mesh
run          from settings to a tally: start, references, one round per fault, leaks
rounds       one fault: load, point, blow, recovery, judgement
faults       what can be broken, by name: add a class, decorate it, done
points       how far the marked request is when the blow falls
mesh         the processes, from heartbeats; signals to them
own_mesh     a mesh of our own: ``mesh up`` and what that starts only one of
witness      where each request is, from what passes on the bus
cases        the requests
clients      bus and HTTP clients that resume as a user's would
answer       what a client read, and its difference from the undisturbed answer
leaks        blocks, leases and processes that stayed
report       tally, table, JSON
"""
