"""Every wait for somebody else has an end.

Questions to the bus go through ``infra.bus.Bus``, whose calls all have time-outs; what waits for a
socket itself stands under ``asyncio.timeout``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    file for layer in ("infra", "pipeline", "workers") for file in (ROOT / layer).rglob("*.py")
)
WAITS = {
    "create_connection", "open_connection", "open_unix_connection", "read_frame", "readexactly",
    "readuntil", "round_trip", "sock_accept", "sock_connect", "sock_recv", "sock_recv_into",
    "sock_sendall", "wait_closed",
}  # fmt: skip
# A server waits for guests for as long as it lives, and for what those that it let in say next.
SERVERS = {
    "infra/transport/handover.py": {"sock_accept", "sock_recv"},
    # a stream around a socket that is connected waits for nothing
    "infra/transport/ucx/door.py": {"sock_accept", "open_connection", "read_frame"},
    "infra/transport/ucx/wire.py": {"readexactly"},  # in read_frame, whose callers set the limit
}


def unbounded(node: ast.AST, *, has_limit: bool = False) -> Iterator[ast.Call]:
    """Awaited calls of ``WAITS`` that no ``asyncio.timeout`` of the same function is around."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        has_limit = False
    if isinstance(node, ast.AsyncWith):
        has_limit = has_limit or any(
            "asyncio.timeout" in ast.unparse(item.context_expr) for item in node.items
        )
    call = node.value if isinstance(node, ast.Await) else None
    if isinstance(call, ast.Call) and _name(call) in WAITS and not has_limit:
        yield call
    for child in ast.iter_child_nodes(node):
        yield from unbounded(child, has_limit=has_limit)


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_wait_for_a_peer_is_without_a_limit(file: Path) -> None:
    """A peer that is gone or frozen holds nobody for ever."""
    name = str(file.relative_to(ROOT))
    found = {_name(call) for call in unbounded(ast.parse(file.read_text()))}
    assert found <= SERVERS.get(name, set())


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_broker_is_asked_through_the_bus_only(file: Path) -> None:
    """The library's own calls wait as they like: outside of ``infra/bus`` only its plain data."""
    relative = file.relative_to(ROOT)
    if relative.parts[:2] == ("infra", "bus"):
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.partition(".")[0] == "nats" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nats"):
            assert node.module in ("nats.js.api",)


def test_the_rule_finds_what_it_looks_for() -> None:
    """A wait beside the limit is one without."""
    tree = ast.parse(
        "async def f():\n"
        "    async with asyncio.timeout(1):\n"
        "        await loop.sock_recv(a, 1)\n"
        "    await loop.sock_connect(a, b)\n"
        "    await read_frame(a, b)\n"
    )
    assert [_name(call) for call in unbounded(tree)] == ["sock_connect", "read_frame"]
