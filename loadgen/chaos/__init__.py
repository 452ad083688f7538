"""``mesh chaos``: break a mesh under load and check every token that its clients read.

command         flags
settings        what to break, how often, in which mesh
run             from settings to a report: start, references, one round per fault, leaks
rounds          one fault: load, point, blow, recovery, judgement
fault           what a fault is: derive from it, decorate, done
faults          every kind that there is, by name
points          how far the marked request is when the blow falls
mesh            the processes, from heartbeats; signals to them
own_mesh        a mesh of our own: ``mesh up`` and what that starts only one of
jumping_clock   a worker whose time of day can be moved
witness         where each request is, from what passes on the bus
cases           the requests
clients         a bus client, and an HTTP client that reconnects and reads on
resume          how it reads on, where a server can
sse_text        a streamed answer's events; ``deltas``: the bus's
answer          what a client read, and its difference from the undisturbed answer
leaks           blocks and leases that stayed
peer            the processes of another server, for ``loadgen.peers_chaos``
report          tally, table, JSON
"""
