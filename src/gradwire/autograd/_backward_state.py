r"""One backward pass on one worker: events in, actions out. No threads, no sockets, no tensors.

The rules (``docs/concepts/backward.md`` argues why they end):

- A *send* is settled once, by a message that carries its gradient or says that there is none.
- A *recv* fires once, when every source that reaches it is settled: with a gradient, or with nothing.
- Sources (the roots, and sends) that share an interior node form a *component*. A component with one source runs when that
  source is settled. One with several is a single run of the local engine, begun when the source created last is
  settled; sends that are not settled by then are waited for inside, the one created last first.
- The first message of a pass from one worker to another carries an introduction: which recvs it *has* from the other, and
  for which sends it *expects* an answer. Whatever the two do not agree on (a call that failed before it arrived, a
  reply that was not taken) is settled with nothing at once, so no send waits for a recv that is not there.
- A worker that joins tells the destinations of its sends that the pass has begun, unless it has received a message from
  them or will certainly write to them without their help: it holds a recv from them that is younger than its sends to them.
- Tensors that came from one worker and went to another untouched, or back, need no answer here: the introduction to the
  other offers a *shortcut* to where they came from. Should the answer arrive here nevertheless, because the recv had
  fired before the offer came, it is passed on as if there had been no shortcut.

Every wait points forward in the order in which messages were made, so waits cannot form a cycle.

FAST mode leaves out introductions and answers without gradient.

How a pass ends, by two-phase commit:

- Every participant reports to the root when everything there is done, with the workers it exchanged messages with. When all
  workers that reports name have reported (`Termination`), the root commits, and tells the others. If the last thing is an
  answer to the root, the report goes with it, before the run that made the answer has ended.
- Whatever fails before that aborts the pass: on the worker where it failed, and from there on every worker that it knows.
- A worker that has reported cannot abort: the root may have committed. It asks the root, and waits for the root's decision.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from gradwire.types import Id, Rank


class Mode(enum.Enum):
    """How a pass treats messages that no gradient reaches."""

    SMART = "smart"
    FAST = "fast"


class Exchange(Protocol):
    """A recorded message: a send (this worker sent it) or a recv (it arrived here)."""

    @property
    def message_id(self) -> int: ...
    @property
    def peer(self) -> int: ...
    @property
    def is_send(self) -> bool: ...


Origin = tuple[Id, Id, Id]
"""Where a tensor came from: a message, the tensor's number in it, and how many it has."""

Route = tuple[Rank, Id, Id, Id]
"""Destination of the gradient of a tensor: a worker, and an origin there."""


class Introduction(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What was recorded here, for the first message of a pass to another worker."""

    has: tuple[Id, ...] = ()  # messages from that worker
    expects: tuple[Id, ...] = ()  # messages to that worker
    # Messages to that worker that need no answer, if the gradients of their tensors go to these routes.
    shortcuts: tuple[tuple[Id, tuple[Route, ...]], ...] = ()


class Component(msgspec.Struct, frozen=True):
    """Sources that must run together."""

    sends: tuple[int, ...]  # in the order in which they were made
    recvs: frozenset[int]  # those that any of its sources reaches
    has_roots: bool = False  # whether the roots are among its sources


class Tell(msgspec.Struct, frozen=True):
    """Tell a worker that these messages have no gradient; without messages, only that the pass has begun."""

    peer: int
    message_ids: tuple[int, ...] = ()
    via: int | None = None  # the worker that passed them on and need not be asked, if that is how they came here


class RunComponent(msgspec.Struct, frozen=True):
    """Run the local engine from the roots (if the component has them) and these sends."""

    index: int
    sends: tuple[int, ...]


class Report(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Report that everything here is done; the root needs the reports of these workers, too."""

    peers: tuple[Rank, ...]  # workers that this one has exchanged messages with in this pass
    absent: tuple[Rank, ...] = ()  # lost workers assumed not to take part; if one did, its last gradients may be lost


class Commit(msgspec.Struct, frozen=True):
    """Commit, on the root: every participant has reported."""

    peers: tuple[int, ...]  # workers that wait for the decision


class Abort(msgspec.Struct, frozen=True):
    """The pass fails: tell these workers."""

    peers: tuple[int, ...]
    ends: bool = True  # otherwise the root decides


class Fail(msgspec.Struct, frozen=True):
    """Fail, on the root: a report shows that the pass is not valid."""

    lost: int | None = None  # a lost worker that took part in the pass
    abort: Any = None  # the abort of a worker that was named only now
    error: Any = None  # why the gradients could not be added up


Action = Tell | RunComponent | Report | Commit | Fail


class PassPhase(enum.Enum):
    RUNNING = "running"
    DONE = "done here, not yet everywhere"
    COMMITTED = "committed"
    ABORTED = "aborted"


class ComponentPhase(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


class Firing(msgspec.Struct, frozen=True):
    """A recv that the local engine reached for the first time."""

    routes: tuple[Route, ...] | None  # of its shortcut; for routes to this worker itself, `came_back` is next
    is_last: bool  # nothing but the report will be sent from now on; something may still run: `report_early`
    is_lost: bool  # the pass goes on without the sender: a gradient for it fails the pass


_MOST_EARLY = 64  # workers whose abort is kept until another one names them


class BackwardState:
    """Decides what one worker does in one pass."""

    def __init__(
        self,
        own: int,
        mode: Mode,
        exchanges: Iterable[Exchange],  # in the order in which they were made
        components: Sequence[Component],  # every send is in exactly one
        # Returns which recvs of a component can be reached from these sends (and from the roots, if it has them).
        reached_by: Callable[[int, Collection[int]], Collection[int]],
        lost: Collection[int] = (),  # workers that were gone before the pass began
        # Sends of received tensors only, alone in their components; with their origins.
        untouched: Mapping[int, tuple[Origin, ...]] | None = None,
        root: int | None = None,  # the worker that called backward; this one if not given
    ) -> None:
        self._own = own
        self._root = own if root is None else root
        self._mode = mode
        self.phase = PassPhase.RUNNING
        self.is_over = False  # whether it is decided here
        self.termination = Termination(own) if self._root == own else None
        self._early: dict[int, Any] = {}  # on the root: aborts of workers that no other worker has named yet
        self._untouched = untouched or {}
        self._offered: dict[int, tuple[Origin, ...]] = {}  # shortcuts, by send, which are not waited for
        self._skipped: set[int] = set()  # recvs that are not answered for that reason
        self._taken: dict[int, tuple[Route, ...]] = {}  # those that others offered, by recv
        self._components = components
        self._reached_by = reached_by
        self.lost = set(lost)  # the pass continues without these: their sends were settled
        self._sends: dict[int, int] = {}
        self._recvs: dict[int, int] = {}
        self._youngest: dict[int, Exchange] = {}  # by worker
        for exchange in exchanges:
            (self._sends if exchange.is_send else self._recvs)[exchange.message_id] = exchange.peer
            self._youngest[exchange.peer] = exchange
        self._unsettled = dict.fromkeys(self._sends)
        self._unfired = dict.fromkeys(self._recvs)
        self._phases = [ComponentPhase.WAITING] * len(components)
        self._nothing: dict[int, set[int]] = {}  # by component: sends settled without a gradient
        self._component_of: dict[int, int] = {}
        for index, component in enumerate(components):
            for send in component.sends:
                self._component_of[send] = index
        self._num_open = len(components)
        self._told: set[int] = set()
        self._heard: set[int] = set()
        self._absent: set[int] = set()
        self.has_reported = False

    # -- events --------------------------------------------------------------------------------------------------

    def begin(self, heard: Collection[int] = ()) -> list[Action]:
        """Join the pass; `heard` are the workers whose message made this one join and is handled next."""
        actions: list[Action] = []
        if self._mode is Mode.SMART:
            if self._untouched:
                self._offer_shortcuts(heard)
            reached: set[int] = set()
            for component in self._components:
                reached |= component.recvs
            if len(reached) < len(self._recvs):
                self._answer_nothing([recv for recv in self._recvs if recv not in reached], actions)
            for peer in self._peers_to_wake(heard):
                self._told.add(peer)
                actions.append(Tell(peer))
            missed: dict[int, bool] = {}
            for send, peer in self._sends.items():
                if peer == self._own and send not in self._recvs:
                    missed[send] = False
            if missed:
                self._settle(missed, actions)
            if self.lost:
                for peer in sorted(self.lost):
                    self._do_without(peer, actions)
        for index, component in enumerate(self._components):
            if component.has_roots:
                self._review(index, actions)
        return self._and_report(actions)

    def message_received(
        self, peer: int, introduction: Introduction | None, settled: Mapping[int, bool]
    ) -> list[Action]:
        """Handle a message of the pass: for each message id, whether it brings a gradient. Repeats are ignored."""
        actions: list[Action] = []
        self._heard.add(peer)
        if introduction is not None:
            known, missed, unknown = set(introduction.has), {}, []
            for send, to in self._sends.items():
                if to == peer and send not in known:
                    missed[send] = False
            for send in introduction.expects:
                if send not in self._recvs:
                    unknown.append(send)
            if unknown:
                self._told.add(peer)
                actions.append(Tell(peer, tuple(unknown)))
            if missed:
                settled = {**missed, **settled}
            for recv, routes in introduction.shortcuts:
                if recv in self._unfired and self._recvs[recv] == peer:
                    self._taken[recv] = routes
        if settled:
            self._settle(settled, actions)
        return self._and_report(actions)

    def recv_fired(self, recv: int) -> Firing | None:
        """Fire a recv that the local engine reached, before its gradient (or none) is sent; None if it has fired before."""
        if self._unfired.pop(recv, recv) is not None:
            return None
        routes, sender = self._taken.get(recv), self._recvs[recv]
        for goal in (sender,) if routes is None else [route[0] for route in routes]:
            if goal not in self.lost:
                self._told.add(goal)
        is_last = not (self._unsettled or self._unfired or self._offered)
        return Firing(routes, is_last, sender in self.lost)

    def report_early(self) -> Report | None:
        """Report with the answer of the last recv, whose run has nothing else to do; None if something else runs."""
        if self.has_reported or self._num_open > 1:
            return None
        self.has_reported = True
        self.done_here()
        return Report(self.peers, tuple(sorted(self._absent)))

    def came_back(self, settled: Mapping[int, bool]) -> list[Action]:
        """Handle a fired recv with a shortcut: for each send here that it leads to, whether there is a gradient."""
        actions: list[Action] = []
        self._settle(settled, actions)
        return self._and_report(actions)

    def component_finished(self, index: int) -> list[Action]:
        actions: list[Action] = []
        self._finish(index, actions)
        return self._and_report(actions)

    def worker_lost(self, peer: int) -> list[Action] | None:
        """Handle the loss of a worker; None if it took part in the pass, which must then fail."""
        if peer in self._told or peer in self._heard:
            return None
        # It is not needed: a worker that has a gradient for it will notice, and so will the root if it took part without
        # contact to this worker (`Report.absent`).
        self.lost.add(peer)
        actions: list[Action] = []
        self._do_without(peer, actions)
        return self._and_report(actions)

    # -- two-phase commit ------------------------------------------------------------------------------------------

    def done_here(self) -> None:
        if self.phase is PassPhase.RUNNING:
            self.phase = PassPhase.DONE

    def report_received(self, worker: int, report: Report) -> list[Action]:
        if self.is_over or self.termination is None:
            return []
        is_complete = self.termination.reported(worker, report.peers, report.absent)
        if self._early:
            for rank, abort in self._early.items():
                if self.termination.is_named(rank):
                    return [Fail(abort=abort)]
        if is_complete:
            return [Commit(tuple(self._followers()))]
        mistaken = self.termination.mistaken
        return [Fail(lost=min(mistaken))] if mistaken else []

    def commit(self) -> None:
        self.phase, self.is_over = PassPhase.COMMITTED, True

    def abort(self, sender: int | None = None, *, is_final: bool = False) -> Abort | None:
        """Abort because of an error here, or of an abort of `sender`. The pass always ends here if `is_final`."""
        if self.is_over:
            return None
        has_reported = self.phase is PassPhase.DONE and self._root != self._own
        if has_reported and not is_final and sender != self._root:
            return Abort((self._root,), ends=False) if sender is None else None
        self.phase, self.is_over = PassPhase.ABORTED, True
        others = self._others()  # the root may not know all of them, even if this worker has reported
        if sender is not None and self._root != self._own:
            others.discard(sender)
        return Abort(tuple(sorted(others)))

    def may_abort(self, sender: int, abort: Any) -> bool:
        """Return whether a worker is known here to take part in the pass.

        The root may not know yet that the worker takes part: then its abort is kept until another participant names it.
        A worker
        that has not reported passes the abort on to workers that can tell the root.
        """
        if sender in self._told or sender in self._heard:
            return True
        if self.termination is None:
            return False
        if self.termination.is_named(sender):
            return True
        if len(self._early) < _MOST_EARLY:
            self._early[sender] = abort
        return False

    def _others(self) -> set[int]:
        return ({self._root} | self._told | self._heard | self._followers()) - {self._own}

    def _followers(self) -> set[int]:
        """Return the workers that wait for the root's decision, whether or not another worker has named them."""
        if self.termination is None:
            return set()
        return {*self.termination.participants, *self._early} - {self._own}

    # -- questions -----------------------------------------------------------------------------------------------

    def introduction_to(self, peer: int) -> Introduction | None:
        if self._mode is Mode.FAST or peer == self._own:
            return None
        has, expects, shortcuts = [], [], []
        for recv, sender in self._recvs.items():
            if sender == peer:
                has.append(recv)
        for send, to in self._sends.items():
            if to == peer:
                expects.append(send)
        for send, origins in self._offered.items():
            if self._sends[send] == peer:
                shortcuts.append((send, tuple([(self._recvs[origin[0]], *origin) for origin in origins])))
        return Introduction(tuple(has), tuple(expects), tuple(shortcuts))

    def awaits(self, send: int, peer: int) -> bool | None:
        """Return whether an answer of that worker for a send is still missing; None if the pass has no such send."""
        if self._sends.get(send) != peer:
            return None
        return send in self._unsettled or send in self._offered

    def is_settled(self, send: int) -> bool:
        return send not in self._unsettled and send not in self._offered

    @property
    def unsettled(self) -> tuple[int, ...]:
        return tuple(self._unsettled)

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(sorted((self._told | self._heard) - {self._own}))

    @property
    def shortcuts(self) -> list[tuple[int, int, int]]:
        """Return the open shortcuts that this worker has offered: a recv, the send that passed it on, and the receiver."""
        return [(origin[0], send, self._sends[send]) for send, ways in list(self._offered.items()) for origin in ways]

    @property
    def taken(self) -> tuple[int, ...]:
        """Return the recvs that are answered by a shortcut past their sender."""
        return tuple(self._taken)

    @property
    def phases(self) -> tuple[ComponentPhase, ...]:
        return tuple(self._phases)

    def __repr__(self) -> str:
        phases = ", ".join(phase.value for phase in self.phases)
        return f"<BackwardState {self._mode.value}, {len(self._unsettled)} sends unsettled, components: {phases or 'none'}>"

    # -- rules ---------------------------------------------------------------------------------------------------

    def _peers_to_wake(self, heard: Collection[int]) -> list[int]:
        """Return workers that might not learn of the pass, or of the messages recorded here, without this one."""
        found: dict[int, None] = {}
        skipped = {self._recvs[recv] for recv in self._skipped} if self._skipped else ()
        for peer in (*self._sends.values(), *skipped):
            is_known = peer == self._own or peer in self._told or peer in self.lost
            if not is_known and (peer in skipped or peer not in heard) and peer not in found:
                youngest = self._youngest[peer]
                # Otherwise this worker owes it an answer that is younger than its sends.
                if youngest.is_send or youngest.message_id in self._skipped:
                    found[peer] = None
        return list(found)

    def _offer_shortcuts(self, heard: Collection[int]) -> None:
        """Offer shortcuts for tensors that were only passed on here, unless their receivers may have answered already."""
        late, nowhere = {self._own, *heard, *self.lost}, {self._own, *self.lost}
        for send, origins in self._untouched.items():
            recvs = {origin[0] for origin in origins}
            if self._sends[send] not in late and nowhere.isdisjoint(self._recvs[recv] for recv in recvs):
                self._offered[send] = origins
                self._skipped |= recvs
                del self._unsettled[send]
                for recv in recvs:
                    del self._unfired[recv]
                self._phases[self._component_of[send]] = ComponentPhase.DONE
                self._num_open -= 1

    def _withdraw(self, send: int) -> None:
        """Withdraw a shortcut that was not taken: the answer arrived here, and this worker passes it on."""
        for origin in self._offered.pop(send):
            self._unfired[origin[0]] = None
        self._unsettled[send] = None
        self._phases[self._component_of[send]] = ComponentPhase.WAITING
        self._num_open += 1

    def _do_without(self, peer: int, actions: list[Action]) -> None:
        """Settle the sends to a lost worker without a gradient."""
        for send in [send for send in self._offered if self._sends[send] == peer]:
            self._withdraw(send)
        waiting = [send for send in self._unsettled if self._sends[send] == peer]
        if waiting:
            self._absent.add(peer)
            self._settle(dict.fromkeys(waiting, False), actions)

    def _settle(self, verdicts: Mapping[int, bool], actions: list[Action]) -> None:
        touched: dict[int, None] = {}
        for send, has_gradient in verdicts.items():
            if send in self._offered:
                self._withdraw(send)
            if self._unsettled.pop(send, send) is not None:
                continue  # a repeat, or sent after this worker joined, so that it cannot contribute to the loss
            index = self._component_of[send]
            if not has_gradient:
                self._nothing.setdefault(index, set()).add(send)
            touched[index] = None
        for index in touched:
            self._review(index, actions)

    def _review(self, index: int, actions: list[Action]) -> None:
        """Decide again for a component whether it can run, need not run, or has recvs that no gradient can reach."""
        if self._phases[index] is not ComponentPhase.WAITING:
            return  # the run picks up later answers by itself
        component = self._components[index]
        live, nothing = component.sends, self._nothing.get(index)
        if nothing:
            live = tuple(send for send in component.sends if send not in nothing)
            if not live and not component.has_roots:
                self._finish(index, actions)
                return
            reached = self._reached_by(index, live)
            self._answer_nothing((recv for recv in component.recvs if recv not in reached), actions)
            if self._phases[index] is not ComponentPhase.WAITING:
                return  # one of them was a message to this worker whose send is in this component: decided meanwhile
            live = tuple(send for send in live if send not in nothing)
        if component.has_roots or live[-1] not in self._unsettled:
            self._phases[index] = ComponentPhase.RUNNING
            actions.append(RunComponent(index, live))

    def _finish(self, index: int, actions: list[Action]) -> None:
        if self._phases[index] is ComponentPhase.DONE:
            return
        self._phases[index] = ComponentPhase.DONE
        self._num_open -= 1
        for recv in self._components[index].recvs:
            if recv in self._unfired:
                self._answer_nothing(self._components[index].recvs, actions)
                break

    def _answer_nothing(self, recvs: Iterable[int], actions: list[Action]) -> None:
        if self._mode is Mode.FAST:
            return
        answers: dict[tuple[int, int | None], dict[int, bool]] = {}  # by receiver and via
        for recv in recvs:
            if recv in self._unfired:
                del self._unfired[recv]
                sender, routes = self._recvs[recv], self._taken.get(recv)
                if routes is None:
                    answers.setdefault((sender, None), {})[recv] = False
                for peer, message_id, _, _ in routes or ():
                    answers.setdefault((peer, sender), {})[message_id] = False
        own: dict[int, bool] = {}
        for (peer, via), verdicts in answers.items():
            if peer == self._own:
                own.update(verdicts)
            elif peer not in self.lost:
                self._told.add(peer)
                actions.append(Tell(peer, tuple(verdicts), via))
        if own:
            self._settle(own, actions)

    def _and_report(self, actions: list[Action]) -> list[Action]:
        if not (self.has_reported or self._unsettled or self._num_open):
            self.has_reported = True
            actions.append(Report(self.peers, tuple(sorted(self._absent))))
        return actions


class Termination:
    """Collects the reports of a pass."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._reachable = {root}
        self._peers: dict[int, frozenset[int]] = {}  # of the workers that have reported
        self._absent: dict[int, set[int]] = {}  # lost workers that they assumed not to take part

    def reported(self, worker: int, peers: Collection[int], absent: Collection[int] = ()) -> bool:
        """Add a report; return whether all participants have reported and the pass is valid. Repeats are ignored."""
        if absent:
            self._absent.setdefault(worker, set()).update(absent)
        if worker not in self._peers:
            self._peers[worker] = frozenset(peers)
            found, todo = {self._root}, [self._root]
            while todo:
                new = self._peers.get(todo.pop(), frozenset()) - found
                found |= new
                todo += new
            self._reachable = found
        return not self.missing and not (self._absent and self.mistaken)

    def is_named(self, worker: int) -> bool:
        return any(worker in peers for reporter, peers in self._peers.items() if reporter != worker)

    @property
    def participants(self) -> frozenset[int]:
        """Return every worker that may take part and must be told of the end, also if it cannot be reached yet."""
        return frozenset(self._reachable.union(self._peers, *self._peers.values()))

    @property
    def mistaken(self) -> set[int]:
        """Return lost workers that one worker left out while others exchanged messages with them: the pass must fail."""
        if not self._absent:
            return set()
        return self._reachable & set().union(*(self._absent.get(worker, ()) for worker in self._reachable))

    @property
    def missing(self) -> set[int]:
        return self._reachable - self._peers.keys()


class WaitingSend(msgspec.Struct, frozen=True):
    """A send that waits for its gradient, as it is shown to people."""

    message_id: int
    worker: str  # sent it and waits
    peer: str  # received it and should answer
    function: str  # that was called, or whose result was sent
    site: str  # where in the user's code
    is_gate: bool = False  # a run of the local engine is blocked on it

    def __str__(self) -> str:
        return f"send {self.message_id:#x} of {self.function} ({self.site}) on worker {self.worker} to {self.peer}"


class PassSnapshot(msgspec.Struct, frozen=True):
    """One participant's answer to the stall probe."""

    worker: str
    is_known: bool = False  # it has joined the pass and not dropped it
    is_done: bool = False  # it has reported
    num_running: int = 0  # runs of its local engine that are not blocked
    num_sent: int = 0  # messages of the pass
    num_received: int = 0
    waiting: tuple[WaitingSend, ...] = ()
    peers: tuple[Rank, ...] = ()  # it exchanged messages with


def is_stalled(before: Mapping[int, PassSnapshot], now: Mapping[int, PassSnapshot]) -> bool:
    """Return whether the pass cannot make progress, from two successive probes of every participant.

    No run computes, every sent message has been handled, and nothing changed between the probes: then no message was in
    flight during the second one. If a worker is not in the pass, or does not answer, the pass ends without a probe, and
    the counts prove nothing.
    """
    if before != now or all(item.is_done for item in now.values()):
        return False
    if any(item.num_running or not item.is_known or not now.keys() >= set(item.peers) for item in now.values()):
        return False
    return sum(item.num_sent for item in now.values()) == sum(item.num_received for item in now.values())
