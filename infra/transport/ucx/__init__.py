"""KV between hosts: UCX moves the bytes, a TCP connection beside it says which.

    wire         what the two ends say to each other, and how a block travels
    link         UCX of one connection: one worker, one endpoint, futures for what is under way
    door         the owner's end: lets in who shows a lease, sends what is asked for
    reader       the other end: asks in turns, copies into our pool, checks
    port         both of them, on a thread with an event loop of its own

Needs ``ucxx``, the extra ``[ucx]``. Only ``link`` imports it.
"""
