"""Where a prompt's KV came from: what usage, log line and metrics say of it.

    prompt = computed + cached + handed over
    cached = device + host + disk + remote

*Cached* was found before anything was computed, on whatever tier, also another worker's (remote).
*Handed over* is what a decode worker got from the prefill worker of the same request: computed or
cached there, and counted there. *Transferred* is what came from another worker, either way.
"""

from __future__ import annotations

import msgspec

from infra.metrics import Metrics


class Origins(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one prompt by origin; they sum to the prompt."""

    device: int
    host: int
    disk: int
    remote: int
    handed_over: int
    computed: int

    @property
    def cached(self) -> int:
        """Found before anything was computed."""
        return self.device + self.host + self.disk + self.remote

    @property
    def transferred(self) -> int:
        """Came from another worker."""
        return self.remote + self.handed_over

    def facts(self) -> dict[str, int]:
        """Fields of a log line."""
        return {
            "computed_tokens": self.computed,
            "cached_tokens": self.cached,
            "device_tokens": self.device,
            "host_tokens": self.host,
            "disk_tokens": self.disk,
            "transferred_tokens": self.transferred,
        }


class OriginCounts:
    """The metrics that tell of all prompts' origins, looked up once."""

    def __init__(self, metrics: Metrics) -> None:
        self._cached = metrics.tokens_cached
        self._by_source = {
            source: metrics.prompt_source_tokens.labels(source)
            for source in Origins.__struct_fields__
        }

    def add(self, origins: Origins) -> None:
        """One prompt more."""
        if origins.cached:
            self._cached.inc(origins.cached)
        for source, counter in self._by_source.items():
            if count := getattr(origins, source):
                counter.inc(count)


def origins_of(
    num_prompt: int,
    *,
    num_cached: int,
    num_promoted: int = 0,
    num_disk: int = 0,
    num_remote: int = 0,
    num_imported: int = 0,
) -> Origins:
    """Split a prompt of ``num_prompt`` tokens.

    Args:
        num_cached: of them, found by the engine: on the device, or promoted from the host tier.
        num_promoted: of those, promoted.
        num_disk, num_remote: what was brought into the host tier for this prompt. It counts as
            far as it was promoted; what the engine had no use for was not a hit.
        num_imported: handed over; may include generated tokens.
    """
    handed_over = min(num_imported, num_prompt)
    cached = min(num_cached, num_prompt - handed_over)
    promoted = min(num_promoted, cached)
    remote = min(num_remote, promoted)
    disk = min(num_disk, promoted - remote)
    return Origins(
        device=cached - promoted,
        host=promoted - remote - disk,
        disk=disk,
        remote=remote,
        handed_over=handed_over,
        computed=num_prompt - handed_over - cached,
    )
