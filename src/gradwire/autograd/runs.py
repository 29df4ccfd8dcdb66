"""One run of torch's engine through a component of a worker's graph, and what the nodes of messages do in it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from gradwire.autograd import ambient, anomalies, guards
from gradwire.autograd._backward_state import Action, Route, RunComponent
from gradwire.autograd._graph import Target
from gradwire.autograd.answers import follow_routes
from gradwire.autograd.context import RecordedRecv
from gradwire.autograd.functions import ANCHOR, Gradients, make_gates, running
from gradwire.autograd.gradients import keep_apart, sum_by_origin
from gradwire.autograd.passes import BackwardPass, PassDropped
from gradwire.autograd.saving import saving
from gradwire.errors import AutogradError

_NO_GRADIENT = torch.zeros(())  # for the anchor, which never gets one
_HANDLE_GRADIENT = torch.empty(0)  # what the engine is given for a send's handle; nobody reads it
_NOTHING = contextlib.nullcontext()
_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward


class EngineRun:
    """A run, in the thread that makes it.

    Args:
        current: The pass it belongs to.
        action: The component, and the sends that may have a gradient.

    Attributes:
        following: What is to be done when it has ended, apart from that it has ended.
    """

    def __init__(self, current: BackwardPass, action: RunComponent) -> None:
        self._pass = current
        self._index = action.index
        self._sends = action.sends
        self._component = current.graph.components[action.index]
        self.following: list[Action] = []

    def run(self) -> None:
        """
        Raises:
            PassDropped: The pass was aborted meanwhile.
            Exception: Whatever a node or a hook raised.
        """
        current = self._pass
        direct = current.graph.direct[self._index]
        if direct is not None and current.roots.inputs is None:  # those may be what passes through
            self._take_directly(direct)
            return
        outputs: list[torch.Tensor | GradientEdge] = []
        gradients: list[torch.Tensor] = []
        waiting = [(send, current.sends[send].output) for send in self._sends if not current.state.is_settled(send)]
        if waiting:
            # The nodes of all sends take part: a recv that none of their gradients reaches must not wait for the gates.
            current.graph.make_room_below()
            unsettled = {send for send, _ in waiting}
            outputs += [current.sends[send].output for send in self._sends if send not in unsettled]
            outputs.append(make_gates(waiting))
            gradients += [_HANDLE_GRADIENT] * len(outputs)
        else:
            for send in self._sends:
                self._add_settled(send, outputs, gradients)
        if self._component.has_roots:
            outputs += current.roots.tensors
            gradients += current.roots.gradients
        self._run_engine(outputs, gradients, current.inputs_of(self._index))

    def _add_settled(
        self, send: int, outputs: list[torch.Tensor | GradientEdge], gradients: list[torch.Tensor]
    ) -> None:
        """What came for a send goes straight to where its tensors came from: its node has nothing to do."""
        edges: Any = self._pass.sends[send].output.grad_fn.next_functions  # type: ignore[union-attr]
        for (node, number), gradient in zip(edges, self.gradients_of(send), strict=True):
            if gradient is not None:
                outputs.append(GradientEdge(node, number))
                gradients.append(gradient)
        # A root that is alone does not count as a node that will be run: `register_multi_grad_hook` asks for that.
        outputs.append(ANCHOR)
        gradients.append(_NO_GRADIENT)

    def _take_directly(self, targets: Sequence[Target]) -> None:
        """What came for a send is the gradient of leaves, and of tensors that came from others and went on untouched."""
        current = self._pass
        wanted = {id(leaf) for leaf in current.inputs_of(self._index)}
        gradients = self.gradients_of(self._sends[0])
        found = [
            (target, gradient)
            for target, gradient in zip(targets, gradients, strict=True)
            if gradient is not None and not isinstance(target, tuple) and id(target) in wanted
        ]
        if found:
            current.add(found)
        for message_id, sums in sum_by_origin(targets, gradients, current.options.create_graph).items():
            numbers = range(current.recvs[message_id].num_tensors)
            self.fire(current.context.context_id, message_id, [sums.get(number) for number in numbers])

    def _run_engine(
        self,
        outputs: Sequence[torch.Tensor | GradientEdge],
        gradients: Sequence[torch.Tensor],
        inputs: list[torch.Tensor],
    ) -> None:
        current, options = self._pass, self._pass.options
        with running(self), ambient.carried(), self._surroundings():
            # What torch.autograd.grad calls, without its checks: they take longer than a small graph.
            results = _run_backward(
                tuple(outputs),
                tuple(gradients),
                options.retain_graph or options.create_graph,
                options.create_graph,
                (*inputs, ANCHOR),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        seen = {gradient.data_ptr() for gradient in current.roots.gradients}
        found = [(leaf, gradient) for leaf, gradient in zip(inputs, results, strict=False) if gradient is not None]
        if not options.create_graph:
            found = [(leaf, keep_apart(gradient, seen)) for leaf, gradient in found]
        current.add(found)

    def _surroundings(self) -> contextlib.AbstractContextManager[object]:
        """Anomaly mode; and a recorded pass saves what the forward pass saved: aliases of shared parameters."""
        options = self._pass.options
        is_saving = options.create_graph and guards.has_any()
        if not (is_saving or options.detects_anomalies):
            return _NOTHING
        stack = contextlib.ExitStack()
        stack.enter_context(anomalies.detecting(options.detects_anomalies))
        if is_saving:
            stack.enter_context(saving(self._pass.context))
        return stack

    # -- for the nodes of messages -----------------------------------------------------------------------------------

    def fire(self, context_id: int, message_id: int, gradients: Gradients) -> None:
        """The engine reached a recv: its gradients go to whoever sent the message."""
        current = self._pass
        recv = current.recvs.get(message_id)
        if context_id != current.context.context_id or recv is None:
            raise AutogradError(
                f"the loss depends on a tensor that came from another worker in context {context_id}, but this is a pass of "
                f"context {current.context.context_id}; detach it, or do both in one context"
            )
        with current.lock:
            if current.is_over:
                raise PassDropped
            if current.state.has_fired(message_id):
                return
            routes = current.state.recv_fired(message_id)
            # Where there are leaves, their nodes and hooks may take long after this.
            is_last = current.state.is_ending and not current.has_leaves
        if routes is not None:
            self._fire_shortly(recv, routes, gradients)
        else:
            current.answer(current, recv, gradients, is_last, None)

    def _fire_shortly(self, recv: RecordedRecv, routes: Sequence[Route], gradients: Gradients) -> None:
        """Somebody has only passed a message on: its gradients go to where its tensors came from."""
        current = self._pass
        settled: dict[int, Gradients | None] = {}
        for (worker, message_id), answer in follow_routes(recv, routes, gradients).items():
            if worker == current.own:  # captured, as on the way to others: two leaves share no memory
                settled[message_id] = answer and [item if item is None else item.clone() for item in answer]
            else:
                origin = RecordedRecv(message_id, worker, recv.function, recv.node)
                current.answer(current, origin, answer or (), False, recv.peer)
        if settled:
            self._settle(recv.peer, settled)

    def _settle(self, via: int, answers: dict[int, Gradients | None]) -> None:
        """Sends of this worker that another one passed back to it."""
        current = self._pass
        with current.lock:
            if current.is_over:
                raise PassDropped
            news = {send: answer is not None for send, answer in answers.items() if current.accept(send, via, answer)}
            actions = current.state.came_back(news)
            current.wake_gates()
        if len(self._component.sends) + self._component.has_roots == 1:
            self.following += actions
        elif actions:  # with several sources, this run may wait for what follows from its own beginning
            current.perform_soon(current, actions)

    def gradients_of(self, message_id: int) -> Gradients:
        """What came for a send; all None if it was settled with nothing."""
        return self._pass.gradients_of(message_id)

    def wait_settled(self, message_id: int) -> None:
        """The local engine stands still until a send is settled."""
        self._pass.wait_settled(message_id)
