"""The subcommands of ``mesh``, one file per group.

roles     control, worker, bridge: one process each    status    what runs
up        a whole mesh                                 generate  one request over the bus
prepare   a model's folder, converted when needed

Like ``infra.cli`` they may import every package, but only inside functions.
"""
