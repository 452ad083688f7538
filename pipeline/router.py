"""Router: give finished prefills to decode workers.

Consumes   mesh.v1.kv-ready.<model@rev>                   KvReady
Publishes  mesh.v1.decode.<model@rev>.<worker|any>        DecodeTask
Keeps      nothing between messages
Twice?     the same task under the same message id; the decode claim decides
Fails      nothing of its own; a request that has ended is found out by the worker that claims
"""

from __future__ import annotations

import time

from pipeline.outlook import Outlook
from pipeline.placement import Placement
from pipeline.stage import Handled, Outgoing, StageContext, Work
from schemas import subjects
from schemas.decode import DecodeTask
from schemas.kv import KvReady


class Router:
    """The kv-ready stage's handler.

    Args:
        outlook: is asked how right its predictions were.
    """

    def __init__(
        self, ctx: StageContext, placement: Placement, outlook: Outlook | None = None
    ) -> None:
        self._ctx = ctx
        self._placement = placement
        self._outlook = outlook

    async def handle(self, work: Work[KvReady]) -> Handled:
        """Place the decode."""
        ready = work.message
        _, served, _ = subjects.split_work(work.subject)
        epoch = ready.epoch + 1
        self._compare(ready.request_id)
        task = DecodeTask(
            request_id=ready.request_id,
            epoch=epoch,
            after_seq=ready.after_seq,
            reader=ready.reader,
            ready=ready,
        )
        worker = self._placement.decode_worker(served, ready)
        return Handled(
            outcome="placed",
            publish=(
                Outgoing(
                    subject=subjects.decode(served, worker),
                    message=task,
                    msg_id=f"{ready.request_id}.decode.{epoch}",
                    epoch=epoch,
                ),
            ),
        )

    def _compare(self, request_id: str) -> None:
        if self._outlook is None:
            return
        ratio = self._outlook.take_ratio(request_id, time.monotonic())
        if ratio is not None:
            self._ctx.metrics.prefill_predicted.observe(ratio)
