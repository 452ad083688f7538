"""The subcommands of ``mesh``, one file per group.

roles     control, worker, bridge: one process each    status    what runs
up        a whole mesh                                 drain     one process leaves
prepare   a model's folder, converted when needed      dead      messages no stage could use
operator  what these need to speak to a mesh           generate  one request over the bus

Like ``infra.cli`` they may import every package, but only inside functions.
"""
