"""A broker of three real nats-server processes on loopback, as a production mesh would use one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from infra.bus import TOKENS, WORK, Bus, EmbeddedBroker
from schemas.errors import MeshError

NUM_NODES = 3
HOST = "127.0.0.1"
UP_S = 120.0  # meta leader elected; 5 s on an idle machine


class Node(EmbeddedBroker):
    """One server; it has the users of the others, under the same passwords."""

    def __init__(self, folder: Path, name: str, port: int, routes: list[int]) -> None:
        super().__init__(folder / name)
        self.name = name
        self._route_port = port
        self._routes = routes

    def share_passwords(self, first: Node) -> None:
        self._passwords = first._passwords

    def _config(self) -> str:
        routes = ", ".join(f'"nats://{HOST}:{port}"' for port in self._routes)
        named = super()._config().replace("server_name: mesh\n", f"server_name: {self.name}\n")
        return f"""{named}
cluster {{
  name: mesh
  listen: "{HOST}:{self._route_port}"
  routes: [{routes}]
}}
"""


class Cluster:
    """Three nodes; clients get the addresses of all of them."""

    def __init__(self, folder: Path) -> None:
        ports = free_ports(NUM_NODES)
        self.nodes = [
            Node(folder, f"node-{number}", port, ports) for number, port in enumerate(ports)
        ]
        for node in self.nodes:
            node.share_passwords(self.nodes[0])

    def url(self, user: str) -> str:
        """For ``Bus.connect``: every node, in the same order."""
        return ",".join(node.url(user) for node in self.nodes)

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    async def until_up(self) -> None:
        """Wait until the nodes have found each other and elected who decides."""
        async with asyncio.timeout(UP_S):
            while not await self._is_up():
                await asyncio.sleep(0.1)

    async def _is_up(self) -> bool:
        try:
            async with await Bus.connect(self.url("control"), role="control") as bus:
                await bus.api("INFO")
        except MeshError:
            return False
        return True

    async def leader_of(self, bus: Bus, stream: str) -> str:
        """The node that decides for a stream now; empty during an election."""
        try:
            info = await bus.api(f"STREAM.INFO.{stream}")
        except MeshError:
            return ""
        return str(info["cluster"].get("leader", ""))

    async def until_replicated(self, bus: Bus) -> None:
        """Wait until all nodes have all of both streams."""
        async with asyncio.timeout(UP_S):
            for stream in (WORK, TOKENS):
                while not await self._is_current(bus, stream):
                    await asyncio.sleep(0.1)

    async def _is_current(self, bus: Bus, stream: str) -> bool:
        try:
            cluster = (await bus.api(f"STREAM.INFO.{stream}"))["cluster"]
        except MeshError:
            return False
        replicas = cluster.get("replicas") or []
        is_whole = len(replicas) == NUM_NODES - 1
        return bool(cluster.get("leader")) and is_whole and all(r["current"] for r in replicas)


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((HOST, 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


@asynccontextmanager
async def cluster_in(folder: Path) -> AsyncIterator[Cluster]:
    """A cluster that can store; all nodes are gone at the end."""
    cluster = Cluster(folder)
    async with AsyncExitStack() as stack:
        for node in cluster.nodes:
            await stack.enter_async_context(node)
        await cluster.until_up()
        yield cluster
