"""One API key: whose it is and what it may."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from schemas.requests import Slo

State = Literal["valid", "expired", "revoked"]
_ANY_END = "*"  # at the end of a model's name


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """What is kept of a key; never the key itself.

    ``models``: names, or beginnings of names with ``*`` behind; None: all. Limits: None means none.
    """

    name: str  # in log lines
    digest: bytes  # 32 bytes of SHA-256
    tenant: str
    models: tuple[str, ...] | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    priority: int = 0  # of a request that names none
    max_priority: int | None = None  # None: as ``priority``
    slo: Slo = field(default_factory=Slo)  # of a request that names neither times nor a class
    expires_unix_s: float | None = None
    is_revoked: bool = False

    @property
    def is_limited(self) -> bool:
        """Whether anything has to be counted for it."""
        return not (
            self.requests_per_minute is None
            and self.tokens_per_minute is None
            and self.concurrent_requests is None
        )

    def state(self, now_unix_s: float) -> State:
        """Whether it opens anything."""
        if self.is_revoked:
            return "revoked"
        has_expired = self.expires_unix_s is not None and now_unix_s >= self.expires_unix_s
        return "expired" if has_expired else "valid"

    def may_use(self, model: str) -> bool:
        """Whether it may ask for ``model``."""
        return self.models is None or any(
            model.startswith(one[:-1]) if one.endswith(_ANY_END) else model == one
            for one in self.models
        )

    def priority_of(self, asked: int | None) -> int:
        """The priority of a request that asks for ``asked``: never above the ceiling."""
        ceiling = self.priority if self.max_priority is None else self.max_priority
        return min(self.priority if asked is None else asked, ceiling)
