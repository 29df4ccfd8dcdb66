"""Workers that run with other versions are told so, on both sides, before anything else happens."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Callable

import msgspec
import pytest

from gradwire.errors import AuthenticationFailed, WorkerLost
from gradwire.rpc.peers import StaticDirectory
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.versions import own_versions
from gradwire.wire.framing import PREFIX_BYTES, encode
from gradwire.wire.messages import MESSAGE_TYPES, PROTOCOL_VERSION, Goodbye, Refused
from rpc import by_hand
from rpc.fixtures import MakeAgents, init_source
from rpc.puppets import Puppet, PuppetError, wait_until


@pytest.mark.parametrize("field", ["python", "torch", "gradwire"])
def test_a_caller_with_another_version_is_refused(
    make_agents: MakeAgents, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    (agent,) = make_agents("a")
    versions = msgspec.structs.replace(own_versions(), **{field: "0.9.1"})
    with caplog.at_level(logging.WARNING, "gradwire"), pytest.raises(AuthenticationFailed) as caught:
        by_hand.connect(agent, versions=versions)
    text = str(caught.value)
    for part in ("worker a runs", "worker mallory", "0.9.1", getattr(own_versions(), field), "install "):
        assert part in text, (part, text)
    assert wait_until(lambda: any("0.9.1" in record.getMessage() for record in caplog.records))


def test_ranks_with_different_versions_do_not_meet(make_puppets: Callable[[int], list[Puppet]], meeting: str) -> None:
    puppets = make_puppets(2)
    puppets[1].do("import gradwire.versions; gradwire.versions.GRADWIRE_VERSION = '9.9.9'")
    for rank, puppet in enumerate(puppets):
        puppet.start(init_source(rank, 2, meeting, init_timeout=60.0))
    for puppet in puppets:
        with pytest.raises(PuppetError, match=r"(?s)RendezvousFailed.*gradwire 9\.9\.9.*install the same version"):
            puppet.result(30.0)


def test_a_caller_with_another_protocol_gets_an_answer(
    make_agents: MakeAgents, caplog: pytest.LogCaptureFixture
) -> None:
    (agent,) = make_agents("a", transports=("tcp",))
    host, _, port = agent.address.uris[0].removeprefix("tcp://").rpartition(":")
    frame = bytearray(encode(Goodbye("of another version")))
    frame[2] = PROTOCOL_VERSION - 1
    with caplog.at_level(logging.WARNING, "gradwire"), socket.create_connection((host, int(port)), timeout=5.0) as sock:
        sock.sendall(frame)
        answer = sock.recv(4096)
    assert MESSAGE_TYPES[answer[3]] is Refused
    assert answer[2] == PROTOCOL_VERSION  # what the caller reads first, and names in its error
    words = f"peer uses protocol version {PROTOCOL_VERSION - 1}, but this worker uses {PROTOCOL_VERSION}; install"
    assert words in msgspec.msgpack.decode(answer[PREFIX_BYTES:], type=Refused).reason
    assert wait_until(lambda: any(words in record.getMessage() for record in caplog.records))


def test_a_listener_with_another_protocol_is_named(make_agents: MakeAgents) -> None:
    answer = bytearray(encode(Refused("it cannot read the received data")))
    answer[2] = PROTOCOL_VERSION + 1
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection = server.accept()[0]
            with connection:
                connection.recv(struct.calcsize("8s"))
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        uri = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        other = WorkerAddress(WorkerInfo("newer", 1), 1, "elsewhere", (uri,))
        (agent,) = make_agents("a", directory=StaticDirectory([other]), transports=("tcp",))
        words = (
            f"newer is lost.*protocol version {PROTOCOL_VERSION + 1}, but this worker uses {PROTOCOL_VERSION}; install"
        )
        with pytest.raises(WorkerLost, match=words):
            agent.call("newer", len, ((),))
        thread.join(5.0)
