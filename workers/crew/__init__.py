"""Many simulated workers in one process, each a whole worker to the rest of the mesh.

plan      which workers: a file that ``mesh worker --crew`` reads
engines   their engines, which share one vocabulary
service   they live: an identity, beats and a drain for each, one connection for all
figures   what each of them did, in a file
"""

from __future__ import annotations

__all__: list[str] = []
