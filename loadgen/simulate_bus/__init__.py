"""``mesh simulate --bus``: a fleet of simulated workers on the real bus.

    model     a model folder without weights: simulated engines want its tokenizer only
    settings  what a run is told
    mesh      a broker, control processes, and few processes of many workers each
    run       a trace through the real client, and what it cost whom
    report    the load's figures and the fleet's

Everything between the queues is what runs in production: admission, router, claims, leases, KV
events, the hand-over of blocks, beats. Only the engines sleep instead of computing.
"""

from __future__ import annotations

__all__: list[str] = []
