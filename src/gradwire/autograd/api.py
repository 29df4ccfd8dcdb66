"""The functions that people call: PyTorch's names, and more.

with gradwire.autograd.context() as ctx:
    loss = rpc_sync("worker1", forward, args=(x,)).sum()
    ctx.backward(loss)
    gradients = ctx.gradients()
"""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from gradwire.autograd.context import EXTENSION, DistAutogradContext
from gradwire.autograd.current_context import current_context, current_context_id, leave
from gradwire.autograd.distributed_graph import DistributedGraph
from gradwire.autograd.explanation import Explanation
from gradwire.autograd.messages import DEFAULT_OPTIONS, DEFAULT_TIMEOUT_S, PassOptions
from gradwire.errors import AutogradError, ConfigurationError, NoActiveContext
from gradwire.rpc.api import current_agent
from gradwire.rpc.api import is_available as rpc_is_available
from gradwire.rpc.connection import current_request
from gradwire.wire.plain import register_plain_number

if TYPE_CHECKING:
    from gradwire.autograd.backward_pass import FollowsBackward
    from gradwire.autograd.engine import DistEngine

ModeName = Literal["smart", "fast"]
Tensors = torch.Tensor | Sequence[torch.Tensor]


def is_available() -> bool:
    """Whether distributed autograd can be used on this platform."""
    return rpc_is_available()


def current_engine() -> DistEngine:
    """Return the engine of the worker whose call the current thread serves, or of this process.

    Raises:
        NotInitialized: This process is not a worker.
    """
    request = current_request()
    agent = request.source.server.agent if request is not None else current_agent()
    engine: DistEngine = agent.extensions[EXTENSION]
    return engine


class ContextId(int):
    """The id of a context, with what can be done in it. Travels to other workers as the plain number."""

    def backward(self, roots: Tensors, retain_graph: bool = False, **options: Any) -> None:
        """As `gradwire.autograd.backward` in this context."""
        backward(self, roots, retain_graph, **options)

    def explain(self) -> Explanation:
        """As `gradwire.autograd.explain` of this context."""
        return explain(self)

    def graph(self, roots: Tensors = (), *, timeout: float = 2.0) -> DistributedGraph:
        """As `gradwire.autograd.graph` of this context."""
        return graph(self, roots, timeout=timeout)

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """As `gradwire.autograd.get_gradients` of this context."""
        return get_gradients(self)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


register_plain_number(ContextId)


class context:
    """A forward and a backward pass, with everything that other workers do for them.

    Calls made inside, by this thread and by threads and tasks that it starts, are recorded; gradients gather in the context
    on every worker, apart from those of other contexts and from ``.grad``. At the end, everything that belongs to it is
    freed on every worker it has touched. Contexts nest.

    Raises:
        NotInitialized: This process is not a worker.
    """

    _id = ContextId(0)
    _token: contextvars.Token[int] | None = None

    def __enter__(self) -> ContextId:
        if self._token is not None:
            raise AutogradError("a context can be entered only once; create another with gradwire.autograd.context()")
        self._engine = current_engine()
        made = self._engine.container.new_context()
        self._token = current_context.set(made.context_id)
        self._id = ContextId(made.context_id)
        return self._id

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        try:
            leave(self._token)
        finally:
            self._engine.release(self._id)


def backward(
    context_id: int,
    roots: Tensors,
    retain_graph: bool = False,
    *,
    gradients: Tensors | None = None,
    create_graph: bool = False,
    inputs: Tensors | None = None,
    mode: ModeName = "smart",
    timeout: float = DEFAULT_TIMEOUT_S,
    optimizer: FollowsBackward | None = None,
) -> None:
    """Compute gradients of the roots, through calls to other workers, and adds them to the context on each of them.

    Nothing is added anywhere unless the whole pass succeeds. ``.grad`` is left alone.

    Args:
        context_id: What `context` gave.
        roots: Tensors on this worker, usually one loss.
        retain_graph: Keep the graph, so that another pass can go through it.
        gradients: One for each root; may be left out for scalars.
        create_graph: Record the pass itself, for gradients of gradients.
        inputs: Gather gradients only for these tensors, which are on this worker.
        mode: ``"smart"`` copes with results and arguments that have no part in the roots; ``"fast"`` does not look for
            them, and fails if there are any.
        timeout: Seconds that the pass may take.
        optimizer: Steps at once, as `DistributedOptimizer.step` with this context does.

    Raises:
        AutogradError: A root cannot be one.
        UnknownContext: The context was released, or never existed here.
        BackwardFailed: Something failed on this or another worker, or the time was over.
        UnsettledSend: FAST mode: a message got no gradient.
        OptimizerStepFailed: The gradients are there, but some workers did not step.
    """
    if optimizer is not None and not hasattr(optimizer, "follow_backward"):
        raise ConfigurationError(
            f"optimizer must be a gradwire.optim.DistributedOptimizer, not a {type(optimizer).__name__}; call the "
            f"step() of other optimizers after backward"
        )
    options = _options(retain_graph, create_graph, inputs is not None, mode, timeout)
    current_engine().backward(context_id, options, roots, gradients, inputs)
    if optimizer is not None:
        optimizer.follow_backward(context_id)


def grad(
    context_id: int,
    outputs: Tensors,
    inputs: Tensors,
    grad_outputs: Tensors | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
    *,
    mode: ModeName = "smart",
    timeout: float = DEFAULT_TIMEOUT_S,
) -> tuple[torch.Tensor | None, ...]:
    """Return gradients of outputs with respect to inputs, both on this worker; the context keeps none.

    Args:
        context_id: What `context` gave.
        outputs: What to differentiate.
        inputs: With respect to what.
        grad_outputs: One for each output; may be left out for scalars.
        retain_graph: Keep the graph; as `create_graph` if not given.
        create_graph: Record the pass itself.
        allow_unused: Return None for inputs that the outputs do not depend on.
        mode: As in `backward`.
        timeout: As in `backward`.

    Raises:
        AutogradError: An output cannot be one, or an input has no part in them.
        UnknownContext: The context was released, or never existed here.
        BackwardFailed: Something failed on this or another worker, or the time was over.
    """
    wanted = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    options = _options(create_graph if retain_graph is None else retain_graph, create_graph, True, mode, timeout)
    table = current_engine().backward(context_id, options, outputs, grad_outputs, wanted, joins_context=False)
    results = tuple(table.get(tensor) for tensor in wanted)
    if not allow_unused and any(result is None for result in results):
        number = results.index(None)
        raise AutogradError(f"the outputs do not depend on input {number}; pass allow_unused=True to get None for it")
    return results


def _options(retain: bool, create: bool, skips_leaves: bool, mode: str, timeout: object) -> PassOptions:
    if mode not in ("smart", "fast"):
        raise ConfigurationError(f'mode must be "smart" or "fast", not {mode!r}')
    timeout_s = _seconds(timeout)
    detects_anomalies = torch.is_anomaly_enabled()
    is_special = retain or create or skips_leaves or detects_anomalies or mode != "smart"
    if timeout_s == DEFAULT_TIMEOUT_S and not is_special:
        return DEFAULT_OPTIONS
    return PassOptions(mode == "fast", bool(retain), bool(create), skips_leaves, detects_anomalies, timeout_s)


def _seconds(timeout: object) -> float:
    if not (isinstance(timeout, int | float) and timeout > 0):
        raise ConfigurationError(f"timeout must be a positive number of seconds, not {timeout!r}")
    return float(timeout)


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients that have gathered in a context on this worker, by leaf tensor.

    Raises:
        UnknownContext: The context was released, or this worker has no part in it.
        RpcTimeout: A pass is done here, and the worker that began it does not say whether it counts.
    """
    return current_engine().container.retrieve(context_id).wait_gradients(DEFAULT_TIMEOUT_S)


def explain(context_id: int) -> Explanation:
    """Find out which worker waits for which in a context: print the result, or take its `as_json`.

    May be called from another thread while a backward pass is under way.

    Raises:
        UnknownContext: The context was released, or this worker has no part in it.
    """
    engine = current_engine()
    return engine.prober.explain(engine.container.retrieve(context_id))


def graph(context_id: int, roots: Tensors = (), *, timeout: float = 2.0) -> DistributedGraph:
    """Return the graph that a backward pass of a context would go through, on all its workers, to look at.

    Notebooks show the result as a picture; `to_svg`, `to_dot`, `to_mermaid` and `to_json` write it. May be called at any
    time in the context, also from another thread while a backward pass is under way.

    Args:
        context_id: What `context` gave.
        roots: Tensors on this worker from which backward would begin, usually the loss: shows what leads to them, too.
        timeout: Seconds in which the workers have to answer. Those that do not are shown without what only they know.

    Raises:
        UnknownContext: The context was released, or this worker has no part in it.
    """
    tensors: tuple[Any, ...] = (roots,) if isinstance(roots, torch.Tensor) else tuple(roots)
    if not all(isinstance(item, torch.Tensor) and item.requires_grad for item in tensors):
        raise AutogradError("roots must be tensors that require grad, on the worker that calls graph")
    engine = current_engine()
    return engine.prober.graph(engine.container.retrieve(context_id), tensors, _seconds(timeout))


# -- PyTorch's functions for looking inside -------------------------------------------------------------------------------


def _new_context() -> DistAutogradContext:
    """Make a context and enter it, until `_release_context`."""
    made = current_engine().container.new_context()
    current_context.set(made.context_id)
    return made


def _release_context(context_id: int) -> None:
    engine = current_engine()
    engine.container.retrieve(context_id)
    engine.release(context_id)
    if current_context_id() == context_id:
        current_context.set(0)


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return current_engine().container.retrieve(context_id)


def _is_valid_context(context_id: int) -> None:
    current_engine().container.retrieve(context_id)


def _current_context() -> DistAutogradContext:
    context_id = current_context_id()
    if not context_id:
        raise NoActiveContext(
            "Current thread doesn't have a valid autograd context. Wrap the code in `with gradwire.autograd.context()`"
        )
    return current_engine().container.retrieve(context_id)


def _get_max_id() -> int:
    return current_engine().container.max_id


def _get_debug_info() -> dict[str, str]:
    numbers = current_engine().statistics()
    return {
        "num_current_backward_passes": str(numbers.num_passes_under_way),
        "num_autograd_contexts": str(numbers.num_contexts),
    }
