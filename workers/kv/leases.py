"""The leases that a worker gave on its blocks. Pure: the time is passed in.

A lease stands from ``give`` until it is released or taken off after its expiry, once. While it
stands, what ``key`` names is kept: a request that is held in the engine, or a loan.
"""

from __future__ import annotations

import hmac
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass


def _nothing(lease: Lease, outcome: str) -> None:
    """Nothing is kept for it."""


@dataclass(slots=True, kw_only=True)
class Lease:
    """One lease. ``key`` names what is kept for it; no reader's word makes it stand longer than
    ``until_s``. Whoever takes it off the book calls ``on_end`` with it, and a word for how it
    ended."""

    lease_id: str
    secret: bytes
    key: str
    expires_s: float  # monotonic
    until_s: float = math.inf
    on_end: Callable[[Lease, str], None] = _nothing


class LeaseBook:
    """All leases that stand."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self.num_refused = 0  # words with a wrong secret or of no lease: repeats, mostly

    def __len__(self) -> int:
        return len(self._leases)

    def give(
        self,
        key: str,
        lease_s: float,
        now_s: float,
        until_s: float = math.inf,
        *,
        on_end: Callable[[Lease, str], None] = _nothing,
    ) -> Lease:
        """A new lease, for ``lease_s``; its reader may extend it, but not beyond ``until_s``."""
        lease = Lease(
            lease_id=secrets.token_hex(8),
            secret=secrets.token_bytes(16),
            key=key,
            expires_s=now_s + lease_s,
            until_s=until_s,
            on_end=on_end,
        )
        self._leases[lease.lease_id] = lease
        return lease

    def stands(self, lease_id: str) -> bool:
        """Whether it was given and has not ended."""
        return lease_id in self._leases

    def may_read(self, lease_id: str, secret: bytes) -> bool:
        """Whether the lease stands and this is its secret."""
        lease = self._leases.get(lease_id)
        return lease is not None and hmac.compare_digest(lease.secret, secret)

    def release(self, lease_id: str, secret: bytes) -> Lease | None:
        """End a lease; None when it does not stand or the secret is wrong (counted)."""
        if not self.may_read(lease_id, secret):
            self.num_refused += 1
            return None
        return self._leases.pop(lease_id)

    def expired(self, now_s: float) -> list[Lease]:
        """Leases past their time. They stand until renewed or taken off."""
        return [lease for lease in self._leases.values() if lease.expires_s <= now_s]

    def renew(self, lease_id: str, lease_s: float, now_s: float) -> None:
        """Let a lease stand for another ``lease_s``; one that ended stays ended."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.expires_s = now_s + lease_s

    def extend(self, lease_id: str, secret: bytes, lease_s: float, now_s: float) -> Lease | None:
        """The reader's word that it still reads: another ``lease_s``, never less than it had.

        Returns:
            The lease; None when it does not stand or the secret is wrong (counted).
        """
        if not self.may_read(lease_id, secret):
            self.num_refused += 1
            return None
        lease = self._leases[lease_id]
        lease.expires_s = max(lease.expires_s, min(now_s + lease_s, lease.until_s))
        return lease

    def take_off(self, lease_id: str) -> Lease | None:
        """End a lease by its owner's decision; None when it had ended."""
        return self._leases.pop(lease_id, None)

    def take_all(self) -> list[Lease]:
        """End all leases."""
        leases, self._leases = list(self._leases.values()), {}
        return leases

    def check_invariants(self) -> None:
        """One lease per held request or loan."""
        keys = [lease.key for lease in self._leases.values()]
        assert len(keys) == len(set(keys)), "two leases on one request"
