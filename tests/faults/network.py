"""Networks that a test can cut: hosts that are network namespaces, and a proxy that delays and breaks connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from itertools import combinations

import pytest

from rpc.puppets import Puppet

_NOWHERE = "02:00:00:00:00:99"  # the address of no network card: what is sent there is lost on the way


def ip(*words: str) -> None:
    """Run the ip command.

    Raises:
        OSError: It failed.
    """
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Hosts:
    """Network namespaces, with a cable between any two of them.

    Attributes:
        names: Of the namespaces.
        addresses: Of the hosts, by number.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.addresses = [f"10.213.77.{number + 1}" for number in range(len(names))]

    def enter(self, number: int, puppet: Puppet) -> None:
        """Move a process to a host."""
        puppet.do(
            f"import ctypes; fd = os.open('/run/netns/{self.names[number]}', os.O_RDONLY)\n"
            "assert ctypes.CDLL(None).setns(fd, 0x40000000) == 0\n"
            "os.close(fd)"
        )

    def cut(self, source: int, target: int) -> None:
        """Lose what one host sends to another, without a word."""
        where = ("lladdr", _NOWHERE, "dev", cable(source, target), "nud", "permanent")
        ip("-n", self.names[source], "neigh", "replace", self.addresses[target], *where)

    def heal(self, source: int, target: int) -> None:
        ip("-n", self.names[source], "neigh", "del", self.addresses[target], "dev", cable(source, target))

    def unplug(self, number: int) -> None:
        """Take one host's cables out."""
        for other in range(len(self.names)):
            if other != number:
                ip("-n", self.names[number], "link", "set", cable(number, other), "down")

    def plug_in(self, number: int) -> None:
        """Put one host's cables in: those that are new, or that were taken out."""
        name, own = self.names[number], self.addresses[number]
        for other, address in enumerate(self.addresses):
            if other != number:
                ip("-n", name, "link", "set", cable(number, other), "up")
                ip("-n", name, "route", "replace", f"{address}/32", "dev", cable(number, other), "src", own)


def cable(one: int, other: int) -> str:
    """Return the name that a cable between two hosts has on both of them."""
    return f"gw{min(one, other)}{max(one, other)}"


@contextlib.contextmanager
def hosts_or_skip(num_hosts: int) -> Iterator[Hosts]:
    """Make hosts for a test, which is skipped where that is not possible."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(make_hosts(num_hosts))
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield made


@contextlib.contextmanager
def make_hosts(num_hosts: int) -> Iterator[Hosts]:
    """Make hosts that can reach each other.

    Raises:
        OSError: This process, kernel or container has no network namespaces.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise OSError("they need root and the ip command")
    hosts = Hosts([f"gwt{os.getpid() % 100000}{letter}" for letter in "abcdefgh"[:num_hosts]])
    with contextlib.ExitStack() as stack:
        for name in hosts.names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        for one, other in combinations(range(num_hosts), 2):
            ends = [("netns", hosts.names[number]) for number in (one, other)]
            device = cable(one, other)
            ip("link", "add", device, *ends[0], "type", "veth", "peer", "name", device, *ends[1])
        for number, name in enumerate(hosts.names):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{hosts.addresses[number]}/32", "dev", "lo")
            hosts.plug_in(number)
        yield hosts


class Proxy:
    """Passes TCP connections on to another address, late, or not at all.

    Attributes:
        delay_s: How late bytes come, in each direction.
        num_connections: That were passed on so far.
    """

    def __init__(self, host: str, port: int, target: tuple[str, int], delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.num_connections = 0
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._gates: dict[str, asyncio.Event] = {}
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(host, port), self._loop).result(10.0)

    async def _start(self, host: str, port: int) -> None:
        self._gates = {"there": asyncio.Event(), "back": asyncio.Event()}
        for gate in self._gates.values():
            gate.set()
        self._server = await asyncio.start_server(self._serve, host, port)

    def hold(self, *ways: str) -> None:
        """Pass nothing on from now on: ``"there"``, ``"back"`` or both."""
        for way in ways:
            self._loop.call_soon_threadsafe(self._gates[way].clear)

    def release(self) -> None:
        for gate in self._gates.values():
            self._loop.call_soon_threadsafe(gate.set)

    def cut(self) -> None:
        """Break every connection, as a router that has forgotten them does."""
        asyncio.run_coroutine_threadsafe(self._cut(), self._loop).result(10.0)

    async def _cut(self) -> None:
        for writer in list(self._writers):
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        try:
            there, onward = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(onward)
        pumps = [self._pump(reader, onward, "there"), self._pump(there, writer, "back")]
        await asyncio.wait([asyncio.ensure_future(pump) for pump in pumps], return_when=asyncio.FIRST_COMPLETED)
        for item in (writer, onward):
            self._writers.discard(item)
            item.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sending = asyncio.ensure_future(self._send(queue, writer, way))
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                queue.put_nowait((self._loop.time() + self.delay_s, data))
        queue.put_nowait((self._loop.time() + self.delay_s, b""))
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await sending

    async def _send(self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, way: str) -> None:
        while True:
            due, data = await queue.get()
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            await self._gates[way].wait()
            if not data:
                return
            writer.write(data)
            await writer.drain()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.release()
        await self._cut()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
