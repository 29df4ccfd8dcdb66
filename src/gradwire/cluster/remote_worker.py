"""A worker in a process that a scheduler started.

It runs inside that process, alongside the scheduler's own code: it does not fork, installs no signal handler, and need not
be in the main thread. The scheduler's program passes messages to `RemoteWorker.handle`, one thread of it waits in
`RemoteWorker.serve`; `gradwire.cluster.enrolment` has the messages. From `Ready` on the driver speaks to the worker over
gradwire's own connections:

    driver  -- cluster.members --> worker     who belongs to the cluster
            -- cluster.dial    -->            whether it reaches others
            -- cluster.leave   -->            that it may go
            <-- cluster.output --             what it prints

A worker whose driver is lost exits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from gradwire import _interrupts
from gradwire.cluster import enrolment
from gradwire.cluster._output_relay import OutputCapture
from gradwire.cluster._worker_main import reset_seeds, serve_driver
from gradwire.cluster.enrolment import Assign, Failed, Introduce, Introduction, Ready
from gradwire.cluster.network_address import address_of_interface, address_towards
from gradwire.config import WorkerConfig
from gradwire.errors import AuthenticationFailed, ConfigurationError, GradwireError
from gradwire.observe.log import print_records
from gradwire.rpc.agent import Agent
from gradwire.rpc.api import refuse_shutdown, reserve_process, reserved_for, set_current_agent
from gradwire.rpc.functions import EncodedAddress
from gradwire.rpc.futures import InterruptibleFuture
from gradwire.rpc.peers import StaticDirectory
from gradwire.runtime import start_worker
from gradwire.transports import registry
from gradwire.types import Seconds, WorkerAddress, WorkerInfo
from gradwire.versions import own_versions
from gradwire.wire.messages import decode_address

LEAVE = "cluster.leave"
DIAL = "cluster.dial"

_ASSIGN_S = 600.0
_LAST_OUTPUT_S = 2.0
_RETURN_S = 5.0  # how long a driver may be cut off
_LOOK_S = 0.2
_WATCH_S = 1.0  # between looks whether there is a connection with the driver
_DIAL_S = 10.0


class RemoteWorker:
    """The worker's side of `gradwire.cluster.remote_launcher`.

    Args:
        address: Address of this machine for other machines; the one on the route to the driver if not given.
        local_index: Number of this process on its machine; ranks follow it.
        host: Name of this machine, for messages.
        assign_timeout_s: How long to wait for the driver's assignment.
        shares_output: Whether the output of this process already goes to the driver's own output.
    """

    def __init__(
        self,
        *,
        address: str | None = None,
        local_index: int = 0,
        host: str | None = None,
        assign_timeout_s: float = _ASSIGN_S,
        shares_output: bool = False,
    ) -> None:
        self._address = address
        self._local_index = local_index
        self._host = host or enrolment.host_name()
        self._shares_output = shares_output
        self._lock = threading.Lock()  # held while a message is handled
        self._key: object = None
        self._agent: Agent | None = None
        self._driver: WorkerAddress | None = None
        self._capture: OutputCapture | None = None
        self._had_faulthandler = False
        self._changed = threading.Condition()  # guards the four below
        self._deadline: float | None = time.monotonic() + assign_timeout_s  # for the driver; None while it is connected
        self._lost_reason: str | None = (
            "the driver did not assign a name to this process in time"  # when that has passed
        )
        self._is_over = False
        self._had_driver = False

    def __repr__(self) -> str:
        return f"<RemoteWorker {self._agent.info.name if self._agent is not None else 'without a name yet'}>"

    @property
    def info(self) -> WorkerInfo | None:
        """Name and rank, once the driver has decided."""
        return None if self._agent is None else self._agent.info

    @property
    def has_driver(self) -> bool:
        """Whether the driver has ever connected; until then, it can abort only over the scheduler's channel."""
        return self._had_driver

    def handle(self, message: bytes) -> bytes:
        """Return the reply to a message from the driver; failures are returned as replies as well."""
        with self._lock:
            try:
                question = enrolment.decode_question(message)
                answer = self._introduce(question) if isinstance(question, Introduce) else self._join(question)
                return enrolment.encode(answer)
            except (Exception, SystemExit) as error:  # an import may do anything
                text = "".join(traceback.format_exception(error))
                if isinstance(error, GradwireError):  # its message is complete without a traceback
                    text = f"{error}\n"
                printed = self._capture.kept() if self._capture is not None else ""
                self._give_up()
                return enrolment.encode(Failed(f"{text}It printed:\n{printed}" if printed else text))

    def serve(self) -> str | None:
        """Return when the driver has released this worker; return the reason if the driver was lost instead.

        Afterwards the process is as before, except for the effects of calls. Functions that are still running continue,
        and their results are dropped.
        """
        while not self._is_over:
            self._watch_driver()
            with self._changed:
                left = _WATCH_S if self._deadline is None else self._deadline - time.monotonic()
                if left <= 0:
                    break
                if not self._is_over:
                    _interrupts.wait(self._changed, min(left, _WATCH_S))
        with self._changed:
            self._is_over = True
        self._give_up()
        return self._lost_reason

    def _watch_driver(self) -> None:
        """Notice that the driver is gone, or back, whatever was reported of it.

        Reports come from single connections, and one that is given up while it is being opened is never reported lost.
        """
        agent, driver = self._agent, self._driver
        if agent is None or driver is None or not self._had_driver:
            return
        is_connected = agent.peers.is_connected(driver.info.id, driver.incarnation)
        with self._changed:
            if is_connected:
                self._deadline = None
            elif self._deadline is None:
                self._expect_driver(_RETURN_S, "there is no connection with the driver")
                _start_thread(self._reach_driver, agent, driver.info.name)

    def _introduce(self, question: Introduce) -> Introduction:
        from gradwire.transports.certificates import ProcessKey

        if self._key is None:
            self._key = ProcessKey()
        assert isinstance(self._key, ProcessKey)
        if question.interface is not None:
            self._address = address_of_interface(question.interface)
        elif self._address is None:
            self._address = address_towards(question.driver_host)
        return Introduction(
            certificate_request=self._key.request(),
            host=self._host,
            address=self._address,
            local_index=self._local_index,
            pid=os.getpid(),
            versions=own_versions(),
        )

    def _join(self, assignment: Assign) -> Ready:
        from gradwire.transports.certificates import ProcessKey

        if not isinstance(self._key, ProcessKey) or self._address is None:
            raise ConfigurationError(
                "the driver sent Assign before Introduce; install the same version of gradwire on all machines"
            )
        if (name := reserved_for()) is not None or self._agent is not None:
            raise ConfigurationError(f"this process is already worker {name} and cannot also be {assignment.name}")
        settings = enrolment.decode_settings(self._key.open(assignment.sealed_settings, assignment.name.encode()))
        reserve_process(assignment.name)  # before any import of the user's
        self._capture = capture = OutputCapture(repeats_early=not self._shares_output)
        # A crash in native code prints where it happened, and ends the thread that would send that to the driver.
        self._had_faulthandler = faulthandler.is_enabled()
        faulthandler.enable(file=capture.stderr_before)
        self._settle_in(assignment.rank, settings)
        driver = assignment.driver.info.name
        directory = StaticDirectory([assignment.driver])
        with self._key.files(assignment.certificate, assignment.authority) as keys:
            config = dataclasses.replace(
                settings.config, transports=transports_of(settings.config), bind_host=self._address, tls=keys
            )
            self._agent = agent = start_worker(assignment.info, config, directory, after=assignment.after)
        directory.complete()
        self._driver = assignment.driver
        self._expect_driver(settings.start_timeout_s, "the driver did not connect in time")
        self._follow(agent, driver, capture)
        set_current_agent(agent, refuse_shutdown)
        return Ready(agent.address)

    def _settle_in(self, rank: int, settings: enrolment.WorkerSettings) -> None:
        os.environ.update(settings.environment)
        sys.path.extend(entry for entry in settings.path if entry not in sys.path and os.path.exists(entry))
        importlib.invalidate_caches()
        torch.set_num_threads(settings.num_threads)
        reset_seeds(rank)
        for module in settings.imports:
            importlib.import_module(module)

    def _follow(self, agent: Agent, driver: str, capture: OutputCapture) -> None:
        """Serve the requests of the driver, and exit some time after it was lost."""

        def on_leave(_: WorkerInfo) -> None:
            self._end()

        def on_dial(_: WorkerInfo, raw: list[bytes], timeout_s: float) -> InterruptibleFuture[dict[str, str]]:
            addresses = [decode_address(item, agent.config.limits) for item in raw]
            answer: InterruptibleFuture[dict[str, str]] = InterruptibleFuture()
            _start_thread(_dial, agent, addresses, timeout_s, answer)
            return answer

        def on_connected(name: str) -> None:
            if name == driver:
                with self._changed:
                    self._deadline, self._had_driver = None, True
                capture.forward_to(agent, driver)

        def on_lost(name: str, reason: str) -> None:
            if name == driver:
                self._expect_driver(_RETURN_S, reason)
                _start_thread(self._reach_driver, agent, driver)

        print_records(shows_worker=False)  # the driver puts the name in front of each line
        serve_driver(agent, driver)
        purpose = f"request this from {agent.info.name}"
        agent.server.register_control(LEAVE, on_leave, only_for=driver, purpose=purpose)
        agent.server.register_control(DIAL, on_dial, list[EncodedAddress], Seconds, only_for=driver, purpose=purpose)
        agent.on_worker_connected(lambda address: on_connected(address.info.name))
        agent.on_worker_lost(lambda address, reason: on_lost(address.info.name, reason))

    def _expect_driver(self, seconds: float, lost_reason: str) -> None:
        """Exit after that many seconds unless the driver connects first."""
        with self._changed:
            if not self._is_over:
                self._deadline, self._lost_reason = time.monotonic() + seconds, lost_reason
                self._changed.notify_all()

    def _reach_driver(self, agent: Agent, driver: str) -> None:
        """Try to reconnect to the driver, which may only be disconnected; `on_connected` is called on success."""
        while (deadline := self._deadline) is not None and time.monotonic() < deadline and not self._is_over:
            try:
                agent.peers.peer(driver).lane("control", deadline)
            except Exception as error:
                if _is_refusal(error):
                    self._expect_driver(0.0, self._lost_reason or "the driver has exited")
                    return
            with self._changed:
                self._changed.wait(_LOOK_S)

    def _end(self) -> None:
        with self._changed:
            self._is_over, self._lost_reason = True, None
            self._changed.notify_all()

    def _give_up(self) -> None:
        """Leave the process as it was."""
        agent, self._agent = self._agent, None
        capture, self._capture = self._capture, None
        if capture is not None:
            faulthandler.disable()
            if self._had_faulthandler and sys.stderr is not None:
                faulthandler.enable()
            capture.close(_LAST_OUTPUT_S)
            reserve_process(None)
        if agent is not None:
            agent.close()
            set_current_agent(None)


def _start_thread(target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, name="gradwire-connect", daemon=True).start()


def _is_refusal(error: BaseException | None) -> bool:
    """Return whether the error means that the other process no longer listens, or has declared this one lost."""
    while error is not None and not isinstance(
        error, ConnectionRefusedError | FileNotFoundError | AuthenticationFailed
    ):
        error = error.__cause__
    return error is not None


def transports_of(config: WorkerConfig) -> tuple[str, ...]:
    """Return the transports of a cluster's members: Unix sockets on this machine, and TLS between machines."""
    return config.transports or ("unix", "tcp")


def _dial(
    agent: Agent, addresses: list[WorkerAddress], timeout_s: float, answer: InterruptibleFuture[dict[str, str]]
) -> None:
    """Open and close a connection to each of the workers; return the errors by name.

    Without a handshake, for which both would have to know each other as members: it is about the way.
    """
    deadline = time.monotonic() + timeout_s
    failed = {}
    for address in addresses:
        try:
            uri = registry.choose_uri(address, agent.address.host, agent.transports)
            agent.transports[uri.partition(":")[0]].connect(uri, min(deadline, time.monotonic() + _DIAL_S)).close()
        except Exception as error:
            failed[address.info.name] = str(error)
    with contextlib.suppress(Exception):  # the driver is gone
        answer.set_result(failed)
