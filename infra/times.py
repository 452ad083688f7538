"""Every time that two processes must agree on, in one table whose relations are checked.

A test mesh runs the same table scaled down: the relations are what make the protocol right, the
figures only how fast it notices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from schemas.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds.

    Raises:
        ConfigError: a time isn't positive, or a relation does not hold; ``param`` is the key.
    """

    beat_s: float = 0.5  # heartbeats of every process
    dead_s: float = 1.5  # silent for so long is dead
    pull_expiry_s: float = 0.5  # a frozen worker's pull takes messages for no longer than this
    ack_wait_s: float = 5.0  # an un-acked message of a shared consumer comes again
    lease_s: float = 10.0  # the right to read KV blocks
    resume_window_s: float = 30.0  # a stream without a reader runs on
    duplicate_window_s: float = 120.0  # the broker drops repeats of a message id
    token_stream_age_s: float = 900.0  # records, chains and tokens are kept
    default_deadline_s: float = 600.0  # a request that names none
    max_deadline_s: float = 780.0  # the latest one that a request may name
    ack_sample_s: float = 0.05  # between two confirmations of a token writer
    call_timeout_s: float = 2.0  # one question to the broker
    connect_timeout_s: float = 10.0  # the first connection; later ones are tried for ever

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"{field.name} must be over 0, not {value!r}", param=field.name)
        for key, holds, rule in self._relations():
            if not holds:
                raise ConfigError(f"{key} = {getattr(self, key)}: {rule}", param=key)

    def _relations(self) -> Iterator[tuple[str, bool, str]]:
        yield "dead_s", self.dead_s >= 3 * self.beat_s, "three beats must fit in (beat_s)"
        yield "pull_expiry_s", self.pull_expiry_s <= self.beat_s, "may not be over beat_s"
        yield "ack_sample_s", self.ack_sample_s <= self.beat_s, "may not be over beat_s"
        yield "ack_wait_s", self.ack_wait_s > self.dead_s, "must be over dead_s"
        yield (
            "lease_s",
            self.lease_s > self.ack_wait_s + self.dead_s,
            "must outlast one redelivery (ack_wait_s + dead_s)",
        )
        yield (
            "resume_window_s",
            self.resume_window_s > self.lease_s,
            "must be over lease_s, or a take-over ends streams",
        )
        yield (
            "duplicate_window_s",
            self.duplicate_window_s > 2 * self.own_ack_wait_s,
            "must outlast two redeliveries (4 * ack_wait_s)",
        )
        yield (
            "default_deadline_s",
            self.default_deadline_s <= self.max_deadline_s,
            "may not be over max_deadline_s",
        )
        yield (
            "token_stream_age_s",
            self.token_stream_age_s > self.max_deadline_s + self.resume_window_s,
            "must outlast the latest deadline and a resume (max_deadline_s + resume_window_s)",
        )

    @property
    def own_ack_wait_s(self) -> float:
        """For a worker's own consumer, where heartbeats and the reaper notice a death first."""
        return 2 * self.ack_wait_s

    @property
    def in_progress_s(self) -> float:
        """Between two signs that a delivered message is still worked on."""
        return self.ack_wait_s / 3

    def scaled(self, factor: float) -> Times:
        """All times but those of single calls, times ``factor``; the relations stay."""
        kept = {"call_timeout_s", "connect_timeout_s"}
        return Times(
            **{
                field.name: getattr(self, field.name) * (1 if field.name in kept else factor)
                for field in fields(self)
            }
        )
