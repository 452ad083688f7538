"""The leases that a worker gave on its blocks. Pure: the time is passed in.

A lease stands from ``give`` until it is released or taken off after its expiry, once. While it
stands, the request that computed the blocks stays held in the engine under ``key``.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Lease:
    """One lease. ``key`` names what the engine holds for it."""

    lease_id: str
    secret: bytes
    key: str
    expires_s: float  # monotonic


class LeaseBook:
    """All leases that stand."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self.num_refused = 0  # releases with a wrong secret or of no lease: repeats, mostly

    def __len__(self) -> int:
        return len(self._leases)

    def give(self, key: str, lease_s: float, now_s: float) -> Lease:
        """A new lease."""
        lease = Lease(
            lease_id=secrets.token_hex(8),
            secret=secrets.token_bytes(16),
            key=key,
            expires_s=now_s + lease_s,
        )
        self._leases[lease.lease_id] = lease
        return lease

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

    def take_off(self, lease_id: str) -> Lease | None:
        """End a lease by its owner's decision; None when it had ended."""
        return self._leases.pop(lease_id, None)

    def take_all(self) -> list[Lease]:
        """End all leases."""
        leases, self._leases = list(self._leases.values()), {}
        return leases

    def check_invariants(self) -> None:
        """One lease per held request."""
        keys = [lease.key for lease in self._leases.values()]
        assert len(keys) == len(set(keys)), "two leases on one request"
