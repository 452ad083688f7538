"""A standing subscription."""

from __future__ import annotations

import contextlib

import nats.errors
from nats.aio.subscription import Subscription


class BusSubscription:
    """What :meth:`Link.subscribe` made."""

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription

    async def unsubscribe(self) -> None:
        """Stop; nothing is delivered after this. Twice does nothing."""
        with contextlib.suppress(
            nats.errors.BadSubscriptionError, nats.errors.ConnectionClosedError
        ):
            await self._subscription.unsubscribe()
