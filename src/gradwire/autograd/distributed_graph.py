"""The distributed autograd graph of a context, as data, text and picture.

`assemble` builds it from the answers of the workers (`worker_views.py`). No answer is trusted: parts that do not fit
together are left out, and the graph notes how many.
"""

from __future__ import annotations

import heapq
import json
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from gradwire.autograd._graph_svg import to_svg
from gradwire.autograd._graph_text import count, to_dot, to_mermaid
from gradwire.autograd.messages import NO_ID
from gradwire.autograd.worker_views import MessageView, Segment, WorkerView, find_settlers
from gradwire.errors import ConfigurationError

NodeKind = Literal["segment", "roots", "received", "unknown"]
_MOST_IN_SVG, _MOST_IN_MERMAID, _MOST_IN_DOT = 100, 200, 2_000


class GraphWorker(msgspec.Struct, frozen=True):
    """A worker that takes part in the context.

    Attributes:
        name: The worker.
        answered: Whether it answered in time; if not, only what others know of it is shown.
        num_sends: Messages that it sent with tensors that require grad.
        num_recvs: Messages that it received with such tensors.
        num_gradients: Leaves whose gradients it holds in the context.
    """

    name: str
    answered: bool = True
    num_sends: int = 0
    num_recvs: int = 0
    num_gradients: int = 0


class GraphNode(msgspec.Struct, frozen=True):
    """Operators that a worker ran between messages.

    Attributes:
        id: Name of the node in this graph.
        worker: Name of the worker.
        kind: ``"segment"``: operators that end in a message. ``"roots"``: operators that end in the roots. ``"received"``:
            tensors of a message, if no segment or several use them. ``"unknown"``: the worker did not answer.
        operators: Names of operators in forward order, each once; the first few.
        num_operators: Number of operators.
        num_leaves: Parameters and other leaves that they use.
        leaf_bytes: Size of these leaves.
        is_passed_on: Received tensors were sent on untouched, so that their gradients can skip this worker.
    """

    id: str
    worker: str
    kind: NodeKind
    operators: tuple[str, ...] = ()
    num_operators: int = 0
    num_leaves: int = 0
    leaf_bytes: int = 0
    is_passed_on: bool = False


class GraphMessage(msgspec.Struct, frozen=True):
    """A message with tensors that require grad: a send on one worker and a recv on another.

    Attributes:
        message_id: The same for both.
        source: Node that sent it.
        target: Node that received it.
        function: The function that was called, or whose result it is.
        is_result: Whether it is a result.
        site: Line of the program that sent it; empty for results.
        num_tensors: Tensors in it that require grad.
        num_bytes: Their size; None if the sender did not answer.
        has_arrived: Whether the receiver has it; True if the receiver did not answer.
        waits_for: Worker from which a running backward pass awaits the gradient of this message; empty if none.
        time_s: Seconds from its send to its recv; None unless events were observed (`gradwire.observe`) on both workers.
    """

    message_id: int
    source: str
    target: str
    function: str
    is_result: bool = False
    site: str = ""
    num_tensors: int = 0
    num_bytes: int | None = None
    has_arrived: bool = True
    waits_for: str = ""
    time_s: float | None = None


class DistributedGraph(msgspec.Struct, frozen=True):
    """The graph that a backward pass of a context goes through, on all workers; `gradwire.autograd.graph` returns it.

    Notebooks show it as a picture. Nodes and messages are in forward order: gradients flow the other way.

    Attributes:
        context_id: The context.
        workers: Workers that take part in it; first the one that asked.
        nodes: Operators that they ran between messages.
        messages: From node to node, mostly of different workers.
        links: Pairs of nodes of one worker, of which the second uses results of the first.
        num_messages: Known messages in the context; more than in `messages` if the graph was shortened.
    """

    context_id: int
    workers: tuple[GraphWorker, ...]
    nodes: tuple[GraphNode, ...] = ()
    messages: tuple[GraphMessage, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    num_messages: int = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that say what is missing."""
        notes = [f"{worker.name} did not answer." for worker in self.workers if not worker.answered]
        if self.num_messages > len(self.messages):
            notes.append(f"Shortened: {len(self.messages):,} of {self.num_messages:,} messages are shown.")
        return tuple(notes)

    def first(self, num_messages: int) -> DistributedGraph:
        """Return the part of the graph with the first messages.

        Raises:
            ConfigurationError: `num_messages` is not a whole number from 0 on.
        """
        given: object = num_messages
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            raise ConfigurationError(f"the number of messages must be a whole number, 0 or more, not {given!r}")
        if num_messages >= len(self.messages):
            return self
        messages = self.messages[:num_messages]
        kept = {item.source for item in messages} | {item.target for item in messages}
        nodes = tuple(node for node in self.nodes if node.id in kept)
        links = tuple(link for link in self.links if kept.issuperset(link))
        return DistributedGraph(self.context_id, self.workers, nodes, messages, links, self.num_messages)

    def __str__(self) -> str:
        workers = ", ".join(worker.name for worker in self.workers)
        return " ".join((f"{count(self.num_messages, 'message')} between {workers}.", *self.notes))

    def to_json(self) -> str:
        """Return all attributes as JSON."""
        return json.dumps(msgspec.to_builtins(self), indent=2)

    def to_dot(self, max_messages: int = _MOST_IN_DOT) -> str:
        """Return the graph in the DOT language of Graphviz, with a cluster for each worker."""
        return to_dot(self.first(max_messages))

    def to_mermaid(self, max_messages: int = _MOST_IN_MERMAID) -> str:
        """Return a Mermaid flowchart, which GitHub and many documentation tools show, with a subgraph for each worker."""
        return to_mermaid(self.first(max_messages))

    def to_svg(self, max_messages: int = _MOST_IN_SVG) -> str:
        """Return a picture: workers side by side, the forward pass from top to bottom. Readable in light and dark."""
        return to_svg(self.first(max_messages))

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x: auto">{self.to_svg()}</div>'


# -- assembly --------------------------------------------------------------------------------------------------------


class _Draft:
    """A node before the nodes are sorted."""

    def __init__(self, worker: str, kind: NodeKind, segment: Segment | None = None) -> None:
        self.worker = worker
        self.kind = kind
        self.segment = segment or Segment()
        self.before: list[_Draft] = []  # what it uses

    def freeze(self, name: str) -> GraphNode:
        s = self.segment
        return GraphNode(
            name, self.worker, self.kind, s.operators, s.num_operators, s.num_leaves, s.leaf_bytes, s.is_passed_on
        )


class _Assembly:
    """Combines what the two ends of each message report."""

    def __init__(self, views: Sequence[WorkerView]) -> None:
        self.views = {view.worker: view for view in views}
        self.drafts: list[_Draft] = []
        self.sent: dict[int, tuple[str, MessageView]] = {}  # by message: the sender, and its view
        self.received: dict[int, tuple[str, MessageView]] = {}
        self.sources: dict[int, _Draft] = {}
        self.targets: dict[int, _Draft] = {}
        self.links: list[tuple[_Draft, _Draft]] = []
        self.others: dict[str, None] = {}  # workers that others name and that were not asked

    def run(self) -> None:
        for name, view in self.views.items():
            for item in view.sends:
                if item.message_id != NO_ID:
                    self.sent.setdefault(item.message_id, (name, item))
        for name, view in self.views.items():
            for item in view.recvs:
                sender = self.sent.get(item.message_id)
                if item.message_id != NO_ID and (
                    sender is None or sender[1].peer == name
                ):  # else the two do not fit together
                    self.received.setdefault(item.message_id, (name, item))
        for name, view in self.views.items():
            self._add_worker(name, view)
        for message_id in {**self.sent, **self.received}:
            self._add_ends(message_id)

    def _add(self, worker: str, kind: NodeKind, segment: Segment | None = None) -> _Draft:
        if worker not in self.views:
            self.others[worker] = None
        self.drafts.append(_Draft(worker, kind, segment))
        return self.drafts[-1]

    def _add_worker(self, name: str, view: WorkerView) -> None:
        """Add its segments, and the links between them and the messages that it received."""
        segments = {segment.message_id: segment for segment in view.segments}
        own = [item.message_id for item in view.sends if self.sent.get(item.message_id, ("",))[0] == name]
        made = {
            message_id: self._add(name, "segment" if message_id != NO_ID else "roots", segments.get(message_id))
            for message_id in dict.fromkeys([*own, *([NO_ID] if NO_ID in segments else [])])
        }
        self.sources.update((message_id, draft) for message_id, draft in made.items() if message_id != NO_ID)
        users: dict[int, list[_Draft]] = {}
        for draft in made.values():
            for message_id in draft.segment.recvs:
                users.setdefault(message_id, []).append(draft)
            for message_id in draft.segment.builds_on:
                if message_id in made and made[message_id] is not draft:
                    self._link(made[message_id], draft)
        for item in view.recvs:
            is_here = self.received.get(item.message_id, ("",))[0] == name
            if is_here and item.message_id not in self.targets:
                used_by = users.get(item.message_id, [])
                if len(used_by) == 1:
                    self.targets[item.message_id] = used_by[0]
                    continue
                target = self.targets[item.message_id] = self._add(name, "received")
                for draft in used_by:
                    self._link(target, draft)

    def _link(self, source: _Draft, target: _Draft) -> None:
        self.links.append((source, target))
        target.before.append(source)

    def _add_ends(self, message_id: int) -> None:
        """Add nodes for ends of a message that no worker reported."""
        if message_id not in self.sources:
            self.sources[message_id] = self._add(self.received[message_id][1].peer, "unknown")
        if message_id not in self.targets:
            self.targets[message_id] = self._add(self.sent[message_id][1].peer, "unknown")
        self.targets[message_id].before.append(self.sources[message_id])


def assemble(
    context_id: int, views: Sequence[WorkerView], clocks: Mapping[str, int] = types.MappingProxyType({})
) -> DistributedGraph:
    """Build the graph of a context from the views of its workers; the first is the one that asks.

    `clocks` has, for workers whose time is known, the nanoseconds to add to it to compare it with that of others.
    """
    parts = _Assembly(views)
    parts.run()
    position = {draft: number for number, draft in enumerate(_in_order(parts.drafts))}
    names = {draft: f"n{number}" for draft, number in position.items()}

    def is_forward(source: _Draft, target: _Draft) -> bool:
        return position[source] < position[target]  # only false reports lead backward

    settlers = find_settlers(views)
    ids = [item for item in parts.targets if is_forward(parts.sources[item], parts.targets[item])]
    ids.sort(key=lambda item: (position[parts.sources[item]], position[parts.targets[item]]))
    known = [GraphWorker(v.worker, v.answered, v.num_sends, v.num_recvs, v.num_gradients) for v in views]
    total = max(sum(view.num_sends for view in views), sum(view.num_recvs for view in views), len(parts.targets))
    return DistributedGraph(
        context_id,
        (*known, *(GraphWorker(name, answered=False) for name in parts.others)),
        tuple(draft.freeze(names[draft]) for draft in position),
        tuple(_message(parts, item, names, settlers.get(item, ""), clocks) for item in ids),
        tuple((names[source], names[target]) for source, target in parts.links if is_forward(source, target)),
        total,
    )


def _message(
    parts: _Assembly, message_id: int, names: dict[_Draft, str], waits_for: str, clocks: Mapping[str, int]
) -> GraphMessage:
    sent, received = parts.sent.get(message_id), parts.received.get(message_id)
    view = (sent or received or ("", None))[1]
    assert view is not None
    # A worker may not know the name of a function that arrived as a pickle; the caller does.
    function = view.function if received is None or not view.is_result else received[1].function or view.function
    receiver = parts.views.get(sent[1].peer) if sent is not None else None
    # The entry may have been in the part of a list that was cut.
    is_told = receiver is not None and receiver.answered and len(receiver.recvs) == receiver.num_recvs
    return GraphMessage(
        message_id,
        names[parts.sources[message_id]],
        names[parts.targets[message_id]],
        function,
        view.is_result,
        "" if view.is_result else view.site,
        view.num_tensors,
        view.num_bytes if sent is not None else None,
        received is not None or not is_told,
        waits_for,
        _time_between(sent, received, clocks),
    )


def _time_between(
    sent: tuple[str, MessageView] | None, received: tuple[str, MessageView] | None, clocks: Mapping[str, int]
) -> float | None:
    if sent is None or received is None or not (sent[1].at_ns and received[1].at_ns):
        return None
    if sent[0] not in clocks or received[0] not in clocks:
        return None
    return max(0, received[1].at_ns + clocks[received[0]] - sent[1].at_ns - clocks[sent[0]]) / 1e9


def _in_order(drafts: Sequence[_Draft]) -> Iterable[_Draft]:
    """Sort nodes so that each comes after what it uses; nodes that wait for each other, in the order given."""
    number = {draft: index for index, draft in enumerate(drafts)}
    users: dict[_Draft, list[_Draft]] = {draft: [] for draft in drafts}
    for draft in drafts:
        for earlier in draft.before:
            users[earlier].append(draft)
    missing = {draft: len(draft.before) for draft in drafts}
    depth = dict.fromkeys(drafts, 0)
    ready = [(0, number[draft]) for draft in drafts if not draft.before]
    done: dict[_Draft, None] = {}
    todo = iter(drafts)
    while len(done) < len(drafts):
        if not ready:  # a cycle: start anywhere
            ready = [(0, number[next(draft for draft in todo if draft not in done)])]
        draft = drafts[heapq.heappop(ready)[1]]
        if draft in done:
            continue
        done[draft] = None
        for user in users[draft]:
            missing[user] -= 1
            depth[user] = max(depth[user], depth[draft] + 1)
            if missing[user] == 0 and user not in done:
                heapq.heappush(ready, (depth[user], number[user]))
    return done
