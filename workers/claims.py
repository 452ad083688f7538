"""Claiming requests, and what is owed for them.

    attempt    one delivery of a task at a time
    claim      -> the request is owed
    settle     it ended, went on elsewhere, or was given back as a prefill task of the next epoch

Every claimed request is owed until it is settled, whatever happens in between; what a worker owes
when it dies is found by the router, on the claim chains.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import msgspec

from infra.bus import Bus
from infra.log import Logger
from pipeline.claim_chain import ChainTip, ClaimChain
from pipeline.prefix_hash import ID_BYTES
from pipeline.stage import Work
from pipeline.takeover import publish_prefill
from schemas import subjects
from schemas.codec import encode, unpack_ids
from schemas.control import DeadLetter
from schemas.decode import DecodeTask
from schemas.errors import (
    BusUnavailable,
    DeadlineExceeded,
    MeshError,
    NoCapacity,
    Poisoned,
    QueueFull,
    SchemaError,
)
from schemas.prefill import PrefillTask
from schemas.requests import RequestRecord
from schemas.tokens import Claim, StreamError

_RETRY_S = 0.1
_RECORD_TRIES, _RECORD_RETRY_S = 5, 0.05  # any server of a cluster may be a moment behind
_REMEMBERED = 8192  # claims made: their tasks may be delivered again
_MAX_LETTER_BYTES = 512 * 1024

T = TypeVar("T")
Task = PrefillTask | DecodeTask
TaskWork = Work[PrefillTask] | Work[DecodeTask]


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """A request that this worker owns under ``epoch``.

    ``tokens`` and ``finished`` are what its stream held when it was claimed, per choice.
    """

    record: RequestRecord
    epoch: int
    seq: int  # of the claim
    role: str
    tokens: tuple[tuple[int, ...], ...] = ()
    finished: tuple[str, ...] = ()
    traceparent: str = ""
    overtakes: bool = False  # as its task says

    @property
    def key(self) -> str:
        """Its name in the engine."""
        return f"{self.record.request_id}.{self.epoch}"

    @property
    def reader(self) -> str:
        """Where its tokens go."""
        return self.record.reader

    @property
    def num_choices(self) -> int:
        """How many sequences it will be."""
        return self.record.sampling.n

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt."""
        return tuple(unpack_ids(self.record.prompt_ids))


def key_of(task: Task) -> str:
    """The name in the engine of what a task leads to."""
    return f"{task.request_id}.{task.epoch}"


def as_claimed(work: TaskWork, record: RequestRecord, role: str, seq: int = 0) -> Claimed:
    """What ``work`` asks for, as it is owned when its claim is stored, at ``seq``."""
    task = work.message
    return Claimed(
        record=record,
        epoch=task.epoch,
        seq=seq,
        role=role,
        traceparent=work.headers.traceparent,
        overtakes=isinstance(task, PrefillTask) and task.overtakes,
    )


def _num_tokens(task: Task, record: RequestRecord) -> int:
    """Of the prompt, and of the answer as far as the task tells."""
    ready = () if isinstance(task, PrefillTask) else task.ready.tokens
    return len(record.prompt_ids) // ID_BYTES + sum(len(run) // ID_BYTES for run in ready)


class Claims:
    """Claims in the name of one worker id.

    Args:
        on_settled: called whenever something is owed no more.
        may_claim: False while others may have given this worker up.
    """

    def __init__(
        self,
        bus: Bus,
        chain: ClaimChain,
        worker: str,
        log: Logger,
        *,
        on_settled: Callable[[], None] = lambda: None,
        may_claim: Callable[[], bool] = lambda: True,
    ) -> None:
        self.chain = chain
        self.worker = worker
        self._bus = bus
        self._log = log
        self._on_settled = on_settled
        self._may_claim = may_claim
        self._owed: dict[str, Claimed] = {}
        self._num_choices = 0  # of all those
        self._attempts: set[str] = set()
        self._made: OrderedDict[str, None] = OrderedDict()  # the latest claims, oldest first

    # What is owed ----------------------------------------------------------------------------

    def owed(self) -> list[Claimed]:
        """What was claimed and not settled."""
        return list(self._owed.values())

    @property
    def num_owed(self) -> int:
        """How many those are."""
        return len(self._owed)

    @property
    def num_choices(self) -> int:
        """How many sequences those are."""
        return self._num_choices

    def owes(self, claimed: Claimed) -> bool:
        """Whether it is still to be worked on."""
        return claimed.key in self._owed

    def settle(self, claimed: Claimed) -> None:
        """Nothing is owed for it any more. Twice is fine."""
        owed = self._owed.pop(claimed.key, None)
        if owed is not None:
            self._num_choices -= owed.num_choices
            self._on_settled()

    # Taking ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def attempt(self, task: Task) -> Iterator[bool]:
        """The work on one delivery of a task, up to its claim.

        Yields:
            False when we have made this claim before: the delivery is a repeat, to be acked.

        Raises:
            NoCapacity: another delivery is being worked on, and may still fail; or this worker
                was away, and leaves the task to others.
        """
        if not self._may_claim():
            raise NoCapacity("this worker was away, and others may have given it up")
        key = key_of(task)
        if key in self._attempts:
            raise NoCapacity("another delivery of this task is in work")
        self._attempts.add(key)
        try:
            yield key not in self._made
        finally:
            self._attempts.discard(key)

    async def record_of(self, task: Task) -> RequestRecord:
        """The admitted request behind a task.

        Raises:
            SchemaError: the stream does not hold it any more.
            BusUnavailable: nobody can be asked now.
        """
        record = task.record if isinstance(task, PrefillTask) else task.ready.record
        if record is not None:
            return record
        for _ in range(_RECORD_TRIES):
            found = await self.chain.record(task.request_id)
            if found is not None:
                return found[1]
            await asyncio.sleep(_RECORD_RETRY_S)
        raise SchemaError(f"no record of request {task.request_id}", param="request_id")

    async def claim(
        self,
        work: TaskWork,
        record: RequestRecord,
        role: str,
        on_written: Callable[[], None] | None = None,
    ) -> Claimed | None:
        """Claim what ``work`` asks for, and store its ``record`` if nobody has; owed from here on,
        with the record that stands: where another was written before, that one counts.

        An append whose answer is lost may have been stored. It is therefore repeated until there
        is an answer: a claim that nobody knows of would keep the request from everybody.

        Args:
            on_written: told, at each try, when record and claim are on their way, see
                :meth:`Bus.when_written`; of a record that is stored it is told nothing.

        Returns:
            None when the chain has gone on: the task is out of date.

        Raises:
            DeadlineExceeded: no answer until the request's deadline.
            InvalidRequest: another reader's request has this id.
        """
        task = work.message
        entry = Claim(
            request_id=record.request_id,
            epoch=task.epoch,
            worker=self.worker,
            role=role,
            served=record.served,
            deadline_unix_ms=record.deadline_unix_ms,
            num_tokens=_num_tokens(task, record),
            max_tokens=(record.sampling.max_tokens or 0) * record.sampling.n,
        )
        seq, record = await self.through_outages(
            record, lambda: self._store(task, record, entry, on_written)
        )
        if seq is None:
            return None
        claimed = as_claimed(work, record, role, seq)
        self._owed[claimed.key] = claimed
        self._num_choices += claimed.num_choices
        self._made[claimed.key] = None
        if len(self._made) > _REMEMBERED:
            self._made.popitem(last=False)
        return claimed

    async def _store(
        self,
        task: Task,
        record: RequestRecord,
        entry: Claim,
        on_written: Callable[[], None] | None,
    ) -> tuple[int | None, RequestRecord]:
        is_recorded = isinstance(task, DecodeTask) or task.is_recorded
        if not is_recorded and not task.after_seq:
            return await self.chain.open(record, entry, on_written)
        return await self.chain.append(record.reader, entry, task.after_seq), record

    async def tip(self, claimed: Claimed) -> ChainTip:
        """The present end of its chain.

        Raises:
            BusUnavailable: nobody can be asked now.
        """
        return await self.chain.tip(claimed.reader, claimed.record.request_id)

    async def is_last(self, claimed: Claimed) -> bool:
        """Whether our claim is the chain's last entry.

        Raises:
            BusUnavailable: nobody can be asked now.
        """
        return (await self.tip(claimed)).seq == claimed.seq

    # Ending ----------------------------------------------------------------------------------

    async def give_back(self, claimed: Claimed, reason: str) -> None:
        """Place a claimed request again, through outages; after its deadline the router ends it."""
        record = claimed.record
        task = PrefillTask(
            request_id=record.request_id,
            epoch=claimed.epoch + 1,
            after_seq=claimed.seq,
            reader=claimed.reader,
        )

        async def publish() -> None:
            await publish_prefill(
                self._bus,
                served=record.served,
                task=task,
                deadline_unix_ms=record.deadline_unix_ms,
            )

        await self._finish(claimed, publish, "request_given_back", reason)

    async def fail(self, claimed: Claimed, error: MeshError) -> None:
        """End a claimed request with an error, through outages; after its deadline the router
        does. A poisonous one is kept as a dead letter."""
        request_id = claimed.record.request_id
        entry = StreamError(request_id=request_id, epoch=claimed.epoch, error=error.info)

        async def end() -> None:
            if isinstance(error, Poisoned):
                await self._bury(claimed, error)
            await self.chain.append(claimed.reader, entry, claimed.seq)

        await self._finish(claimed, end, "request_failed", error.message)

    async def _finish(
        self, claimed: Claimed, action: Callable[[], Awaitable[None]], event: str, reason: str
    ) -> None:
        if not self.owes(claimed):
            return  # it ended elsewhere meanwhile
        try:
            await self.through_outages(claimed.record, action)
        except DeadlineExceeded:
            reason = f"{reason}; past its deadline"
        finally:
            self.settle(claimed)
        self._log.warning(
            event, request_id=claimed.record.request_id, epoch=claimed.epoch, reason=reason
        )

    async def _bury(self, claimed: Claimed, error: Poisoned) -> None:
        payload = encode(claimed.record)
        letter = DeadLetter(
            subject=subjects.prefill(claimed.record.served),
            reason=error.message,
            code=error.code,
            payload=payload[:_MAX_LETTER_BYTES],
            payload_bytes=len(payload),
            stage=claimed.role,
            process=self.worker,
            unix_ms=self._bus.now_unix_ms(),
        )
        await self._bus.publish_stored(
            subjects.DEAD, encode(letter), msg_id=f"dead.{claimed.record.request_id}"
        )

    async def through_outages(self, record: RequestRecord, action: Callable[[], Awaitable[T]]) -> T:
        """What ``action`` returns; it is tried again while the bus is away or a queue full. Each
        try ends by itself, as every call on the bus does; the first one is left to that.

        Raises:
            DeadlineExceeded: the request's deadline passed first.
        """
        left_ms = record.deadline_unix_ms - self._bus.now_unix_ms()
        if left_ms > 0:
            with contextlib.suppress(BusUnavailable, QueueFull):
                return await action()
            await asyncio.sleep(_RETRY_S)
            left_ms = record.deadline_unix_ms - self._bus.now_unix_ms()
        try:
            async with asyncio.timeout(left_ms / 1000):
                while left_ms > 0:
                    try:
                        return await action()
                    except (BusUnavailable, QueueFull):
                        await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            pass
        raise DeadlineExceeded("the bus was away until the deadline")
