"""How KV blocks move between processes: ``shm`` on one host, ``ucx`` between hosts.

shm          a pool in shared memory
handover     shm: the owner's door, and the reader that maps what it gives
ucx          the same over a network; imported only where it is used
wanted       what a handle asks for, and the checks that make a copy a read
reader       the one face of both for whoever has a handle
"""
