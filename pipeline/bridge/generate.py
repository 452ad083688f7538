"""From requests to tokens: the token streams behind one HTTP request.

A request with several prompts is one mesh request, and so one token stream, per prompt; each has
``n`` choices. Choices are numbered prompt by prompt: ``prompt * n + index``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from infra.failure import first_mesh_error
from infra.log import Logger
from pipeline.bridge.call import Call
from pipeline.bridge.ports import Stream
from schemas.errors import MeshError, NoCapacity
from schemas.tokens import Accepted, StreamEnd, TokenDelta, Usage

Opener = Callable[[], Awaitable[Stream]]
Sink = Callable[[int, Sequence[TokenDelta]], Awaitable[None]]
Taker = Callable[[int, Sequence[TokenDelta]], bool]

_NO_TOKENS = Usage(prompt_tokens=0, completion_tokens=0)


async def together(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run ``jobs`` side by side; the first MeshError cancels the others and is raised as it is."""
    if len(jobs) == 1:
        await jobs[0]
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            for job in jobs:
                tasks.create_task(job)
    except ExceptionGroup as group:
        error = first_mesh_error(group)
        if error is None:
            raise
        raise error from group


class Generation:
    """The token streams of one HTTP request. Close it in any case.

    Args:
        openers: one per prompt: what begins its stream.
        n: choices of each prompt.
    """

    def __init__(self, openers: Sequence[Opener], n: int) -> None:
        self._openers = openers
        self._streams: dict[int, Stream] = {}  # by prompt
        self._words: dict[int, Accepted] = {}
        self._ends: dict[int, StreamEnd] = {}
        self.n = n
        self.num_prompts = len(openers)  # and so token streams
        self.accepted: Sequence[Accepted] = ()  # what admission said, per prompt; after open()
        self.prompt_tokens = 0  # of all prompts; after open()
        self.is_complete = False  # every prompt has its end: run() has ended well
        self.reasons: Sequence[str] = ()  # finish reasons, per choice; when complete
        self.usage = _NO_TOKENS  # of all prompts together; when complete

    async def open(self) -> None:
        """Begin all streams and wait until admission has accepted their requests.

        Raises:
            MeshError: the bus refused, or admission did, for one of them.
        """
        await together([self._open_one(i) for i in range(self.num_prompts)])
        self.accepted = [self._words[i] for i in range(self.num_prompts)]
        self.prompt_tokens = sum([word.prompt_tokens for word in self.accepted])

    async def _open_one(self, prompt: int) -> None:
        stream = await self._openers[prompt]()
        self._streams[prompt] = stream
        self._words[prompt] = await stream.accepted()

    @property
    def echoes(self) -> list[str]:
        """Per choice, the text that goes in front of it."""
        return [one.echo_text or "" for one in self.accepted for _ in range(self.n)]

    async def run(self, sink: Sink, taker: Taker | None = None) -> None:
        """Give ``sink`` all deltas, with the number of the first choice of their prompt.

        Prompts are read side by side; a sink that waits holds back only its own prompt.

        Args:
            taker: is offered what comes right as it comes, and says whether it took it; the sink
                gets the rest, in order. No task is woken for what it takes.

        Raises:
            MeshError: one of the streams failed.
        """
        await together([self._pump(i, sink, taker) for i in range(self.num_prompts)])
        ends = [self._ends[i] for i in range(self.num_prompts)]
        self.reasons = [reason for end in ends for reason in end.finish_reasons]
        self.usage = ends[0].usage if len(ends) == 1 else _sum_of([end.usage for end in ends])
        self.is_complete = True

    async def _pump(self, prompt: int, sink: Sink, taker: Taker | None) -> None:
        stream, first = self._streams[prompt], prompt * self.n
        if taker is not None:
            stream.follow(partial(taker, first))
        try:
            while deltas := await stream.next_deltas():
                await sink(first, deltas)
        finally:
            stream.follow(None)
        if stream.end is not None:
            self._ends[prompt] = stream.end

    @property
    def is_ending(self) -> bool:
        """Whether nothing follows what is ready but the end, which comes at once. Of a single
        prompt; several are read side by side."""
        return self.num_prompts == 1 and self._streams[0].is_ending

    @property
    def is_durable(self) -> bool:
        """Whether all its requests are stored."""
        return all(stream.is_durable for stream in self._streams.values())

    @property
    def has_begun(self) -> bool:
        """Whether a token was heard of."""
        return any(stream.num_tokens for stream in self._streams.values())

    @property
    def tokens_so_far(self) -> int:
        """What it has used by now: prompts that admission has counted, tokens that were heard of;
        all, by the usage, when it is complete."""
        if self.is_complete:
            return self.usage.prompt_tokens + self.usage.completion_tokens
        prompts = sum(word.prompt_tokens for word in self._words.values())
        return prompts + sum(stream.num_tokens for stream in self._streams.values())

    @property
    def facts(self) -> dict[str, Any]:
        """For the request's log line; complete after :meth:`run`."""
        usage = self.usage
        return {
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "finish_reason": "length" if "length" in self.reasons else "stop",
        }

    async def close(self, reason: str, keeps: Callable[[str], bool], log: Logger) -> None:
        """Let go of all streams. What has not ended is cancelled, for ``reason`` if there is one,
        unless ``keeps`` says of its request id that it may run on.

        A bus that is away can't be told: the requests then end at their deadline.
        """
        for stream in self._streams.values():
            if stream.end is not None:
                stream.leave()
        left = [stream for stream in self._streams.values() if stream.end is None]
        if left:
            await together([self._close_one(one, reason, keeps, log) for one in left])

    @staticmethod
    async def _close_one(
        stream: Stream, reason: str, keeps: Callable[[str], bool], log: Logger
    ) -> None:
        if keeps(stream.request_id):
            stream.leave()
            return
        try:
            if reason:
                await stream.cancel(reason)
            await stream.aclose()
        except MeshError as error:
            log.warning("cancel_failed", code=error.code, reason=error.message)


def _sum_of(usages: Sequence[Usage]) -> Usage:
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
    )


async def opened(call: Call, generation: Generation, timeout_s: float) -> None:
    """Open ``generation``; attended work of ``call``, which ends with NoCapacity when admission
    does not decide within ``timeout_s``.

    Raises:
        MeshError: as :meth:`Generation.open`.
    """
    alarm = call.interrupt_after(
        timeout_s, lambda: NoCapacity(f"admission did not answer within {timeout_s:g} s")
    )
    try:
        await generation.open()
    finally:
        alarm.cancel()
