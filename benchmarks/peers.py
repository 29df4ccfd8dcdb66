"""The systems that are measured, each behind the same calls: start, noop, echo, async_noops, close.

    driver process                          server process
      peer.echo(tensor)      ------->         echo(tensor)
                             <-------

gradwire uses torch's names, so one class drives both.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import socket
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from actor_peers import MonarchActor, RayActor, RayGraph
from by_hand import ByHand
from models import OneProcess

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch.distributed.rpc"])  # the slow import is paid once, not once for each process
JOIN_TIMEOUT_S = 20.0
LARGEST = 64 << 20
CORES = os.sched_getaffinity(0)
SHARED_FROM = 16 << 10  # the floor sends smaller tensors through its socket, where they arrive in one piece
IN_SOCKET = b"\xff"  # first byte of such a message; a size in shared memory never starts with it


def noop() -> None:
    """Called on the server."""


def echo(tensor: torch.Tensor) -> torch.Tensor:
    """Called on the server."""
    return tensor


def make_small() -> torch.Tensor:
    """Called on the server, where the result stays."""
    return torch.ones(16)


def memory_bytes() -> dict[str, int]:
    """Resident bytes of the process it runs in, and the part of them that is shared memory."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    kib = {words[0]: int(words[1]) for words in lines if words[0] in ("VmRSS:", "RssShmem:")}
    return {"rss": kib["VmRSS:"] << 10, "shared": kib["RssShmem:"] << 10}


class RpcPeer:
    """Two workers, ``driver`` here and ``server`` in a process of its own; more servers for those that name more."""

    module = ""
    server_names: tuple[str, ...] = ("server",)

    def options(self, rpc: Any, folder: Path) -> Any:
        raise NotImplementedError

    def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        folder = Path(self._folder.name)
        self.prepare(folder)
        ranks = range(1, len(self.server_names) + 1)
        self.servers = [CONTEXT.Process(target=_serve, args=(type(self), rank, folder), daemon=True) for rank in ranks]
        for server in self.servers:
            server.start()
        self.rpc = self.join_cluster("driver", 0, folder)

    def prepare(self, folder: Path) -> None:
        """What has to be there before either worker starts."""

    def join_cluster(self, name: str, rank: int, folder: Path) -> Any:
        torch.set_num_threads(1)
        rpc = importlib.import_module(self.module)
        world_size = 1 + len(self.server_names)
        rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=self.options(rpc, folder))
        return rpc

    @functools.cached_property
    def autograd(self) -> Any:
        """The system's distributed autograd."""
        return importlib.import_module(self.module.removesuffix("rpc") + "autograd")

    def call(self, function: Any, *args: Any) -> Any:
        return self.rpc.rpc_sync("server", function, args=args)

    def noop(self) -> None:
        self.rpc.rpc_sync("server", noop)

    def echo(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.rpc.rpc_sync("server", echo, args=(tensor,))

    def create_and_fetch(self) -> torch.Tensor:
        return self.rpc.remote("server", make_small).to_here()

    def async_noops(self, num_calls: int) -> None:
        torch.futures.wait_all([self.rpc.rpc_async("server", noop) for _ in range(num_calls)])

    def close(self) -> None:
        self.rpc.shutdown()
        for server in self.servers:
            server.join(JOIN_TIMEOUT_S)
        self._folder.cleanup()


def _serve(peer_class: type[RpcPeer], rank: int, folder: Path) -> None:
    name = peer_class.server_names[rank - 1]
    peer_class().join_cluster(name, rank, folder).shutdown()  # shutdown waits until the driver leaves


class TorchRpc(RpcPeer):
    """torch.distributed.rpc as it comes: shared-memory transport on one machine."""

    module = "torch.distributed.rpc"
    transport: dict[str, list[str]] = {}  # noqa: RUF012

    def options(self, rpc: Any, folder: Path) -> Any:
        os.environ["TP_SOCKET_IFNAME"] = "lo"
        warnings.showwarning = lambda *_: None  # torch's own deprecations; its optimizer overrides any filter
        return rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rendezvous", **self.transport)


class TorchRpcTcp(TorchRpc):
    """torch.distributed.rpc over TCP alone."""

    transport = {"_transports": ["uv"], "_channels": ["basic"]}  # noqa: RUF012


class TorchRpcPair(TorchRpc):
    """torch.distributed.rpc as it comes, with two servers."""

    server_names = ("server", "server2")


class Gradwire(RpcPeer):
    """gradwire as it comes: Unix socket and shared memory on one machine."""

    module = "gradwire.rpc"

    def options(self, rpc: Any, folder: Path) -> Any:
        return rpc.RpcOptions(init_method=f"file://{folder}/rendezvous", **self.transport(folder))

    def transport(self, folder: Path) -> dict[str, Any]:
        return {}


class GradwirePair(Gradwire):
    """gradwire as it comes, with two servers."""

    server_names = ("server", "server2")


def _with_servers(base: type[RpcPeer], num_servers: int) -> type[RpcPeer]:
    """A system with so many servers, found by its name in this module as processes of it look for it."""
    name = f"{base.__name__}{num_servers}"
    names = tuple(f"server{number}" for number in range(1, num_servers + 1))
    globals()[name] = type(name, (base,), {"server_names": names, "__module__": __name__})
    return globals()[name]


MANY_SERVERS = tuple(_with_servers(base, number) for number in (2, 4, 8) for base in (TorchRpc, Gradwire))


class GradwireByHand(Gradwire):
    """gradwire's calls alone; gradients by hand."""

    def start(self) -> None:
        super().start()
        self.rpc = self.autograd = ByHand(self.rpc)


class GradwireTcp(Gradwire):
    """gradwire over TCP on loopback, without TLS."""

    def transport(self, folder: Path) -> dict[str, Any]:
        return {"transports": ("tcp",)}


class GradwireTls(Gradwire):
    """gradwire over TCP on loopback with TLS 1.3 on both sides."""

    def prepare(self, folder: Path) -> None:
        importlib.import_module("gradwire.transports.tls").make_keys(folder)

    def transport(self, folder: Path) -> dict[str, Any]:
        keys = importlib.import_module("gradwire.config").TlsKeys.in_folder(folder)
        return {"transports": ("tcp",), "tls": keys, "trust": "code"}  # as the others, which have no keys


class Floor:
    """What any Python program here pays: a message each way over a Unix socket; large tensors in warm shared memory.

    Its two processes are kept on two cores. Left alone, the scheduler puts them on one core in some rounds and on two
    in others, and a ping-pong takes 15 us or 55 us accordingly: no figure to hold anything against.
    """

    cores = ({min(CORES)}, {max(CORES)})  # the driver's and the server's

    def start(self) -> None:
        torch.set_num_threads(1)
        self._socket, theirs = socket.socketpair()
        out, self._back = (torch.zeros(LARGEST, dtype=torch.uint8).share_memory_() for _ in range(2))
        self._out = memoryview(out.numpy())  # a slice of it is copied by memmove, without torch's dispatch
        server = CONTEXT.Process(target=_serve_floor, args=(theirs, out, self._back, self.cores[1]), daemon=True)
        server.start()
        self.servers = [server]
        theirs.close()
        os.sched_setaffinity(0, self.cores[0])

    def noop(self) -> None:
        self._socket.send(IN_SOCKET)
        self._socket.recv(1)

    def echo(self, tensor: torch.Tensor) -> torch.Tensor:
        view = memoryview(tensor.numpy()).cast("B")
        if len(view) < SHARED_FROM:
            self._socket.sendmsg([IN_SOCKET, view])
            result = torch.empty_like(tensor)
            self._socket.recvmsg_into([bytearray(1), result.numpy()])
            return result
        self._out[: len(view)] = view
        self._socket.send(len(view).to_bytes(8, "big"))
        self._socket.recv(8)
        return self._back[: len(view)].view(tensor.dtype)

    def close(self) -> None:
        self._socket.close()
        self.servers[0].join(JOIN_TIMEOUT_S)


class BulkFloor(Floor):
    """The same for large tensors: copies take about as long on any core, so the scheduler may keep out of others' way."""

    cores = (CORES, CORES)


def _serve_floor(sock: socket.socket, incoming: torch.Tensor, outgoing: torch.Tensor, cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)
    source, target = memoryview(incoming.numpy()), memoryview(outgoing.numpy())
    while request := sock.recv(SHARED_FROM + 1):
        if request[:1] != IN_SOCKET:
            num_bytes = int.from_bytes(request, "big")
            target[:num_bytes] = source[:num_bytes]
        sock.send(request)


SYSTEMS = (
    TorchRpc,
    TorchRpcPair,
    TorchRpcTcp,
    Gradwire,
    GradwirePair,
    GradwireByHand,
    GradwireTcp,
    GradwireTls,
    Floor,
    BulkFloor,
    OneProcess,
    RayActor,
    RayGraph,
    MonarchActor,
    *MANY_SERVERS,
)
PEERS = {system.__name__: system for system in SYSTEMS}
