"""The figures of ``mesh bench slow``, and its clients on plain sockets."""

from __future__ import annotations

import asyncio
import socket
import threading

import msgspec
import pytest

from loadgen.bench.greedy import Block, Cuts
from loadgen.bench.slow import Seen, SlowSettings, gaps_ms, make_result
from loadgen.bench.slow_client import CUT, NotAnswered, SocketClient, http_client
from loadgen.machine import MachineNote
from loadgen.measure import RequestResult
from schemas.errors import ConfigError

BLOCKS = [
    Block(is_slow=False, start_s=0.0, end_s=1.0),
    Block(is_slow=True, start_s=1.0, end_s=2.0),
    Block(is_slow=False, start_s=2.0, end_s=3.0),
]


def result(*event_s: float, state: str = "completed") -> RequestResult:
    made = RequestResult(number=0, output_len=9)
    for at_s in event_s:
        made.add_event(at_s)
    made.state = state  # type: ignore[assignment]
    return made


def test_a_gap_belongs_to_the_block_that_holds_both_its_ends() -> None:
    """One that spans the change of blocks says nothing of either."""
    stream = result(0.5, 0.75, 1.125, 1.25, 1.75, 2.5, 2.625)
    assert gaps_ms([stream], BLOCKS, is_slow=False) == [250.0, 125.0]
    assert gaps_ms([stream], BLOCKS, is_slow=True) == [125.0, 500.0]


def test_the_change_is_that_of_the_readers_p99() -> None:
    """And beside it what became of those who did not read."""
    seen = Seen(
        results=[result(0.0, 0.1, 0.2, 1.0, 1.11, 1.22), result(state="failed")],
        blocks=BLOCKS[:2],
        cuts=Cuts(num_slow=3, after_s=[2.0, 4.0], num_told=2),
    )
    found = msgspec.json.decode(make_result(SlowSettings(), seen, MachineNote.now()).to_json())
    assert found["itl_ms"]["all_read"]["p99"] == pytest.approx(100.0)
    assert found["itl_p99_change_percent"] == pytest.approx(10.0)
    assert (found["requests"], found["errors"]) == (1, 1)
    assert (found["slow_clients"], found["cut"], found["cut_and_told_why"]) == (3, 2, 2)
    assert found["cut_after_s"] == 3.0


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"pairs": 0}, "pairs"), ({"readers": 1}, "readers"), ({"block_s": 0.1}, "block")],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, float], param: str) -> None:
    """By the name of the flag."""
    with pytest.raises(ConfigError) as caught:
        SlowSettings(**changes)  # type: ignore[arg-type]
    assert caught.value.param == param


async def test_the_reason_is_found_behind_what_was_not_read() -> None:
    """However much lies before it."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    words = b"x" * 300_000 + b'data: {"error":{' + CUT + b"}}\n\n"
    sender = threading.Thread(target=lambda: (theirs.sendall(words), theirs.close()))
    sender.start()
    try:
        assert CUT in await SocketClient("", "r", ours, bytearray()).rest(30)
    finally:
        ours.close()
        await asyncio.to_thread(sender.join, 30)


async def test_a_refusal_is_an_error_and_not_a_slow_client() -> None:
    """An answer without a request id is none of a mesh."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(NotAnswered, match="503"):
            async with http_client(f"http://127.0.0.1:{port}", "m"):
                pass
