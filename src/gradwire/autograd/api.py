"""Public functions of distributed autograd: PyTorch's names, and more.

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
from gradwire.wire.devices import hand_over, on_default_streams
from gradwire.wire.plain import register_plain_number

if TYPE_CHECKING:
    from gradwire.autograd.backward_pass import FollowsBackward
    from gradwire.autograd.engine import DistEngine

ModeName = Literal["smart", "fast"]
Tensors = torch.Tensor | Sequence[torch.Tensor]


def is_available() -> bool:
    """Return whether distributed autograd can be used on this platform."""
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
    """The id of a context, with methods that use it. Other workers receive it as a plain int."""

    def backward(self, roots: Tensors, retain_graph: bool = False, **options: Any) -> None:
        """Call `gradwire.autograd.backward` with this context."""
        backward(self, roots, retain_graph, **options)

    def explain(self) -> Explanation:
        """Call `gradwire.autograd.explain` with this context."""
        return explain(self)

    def graph(self, roots: Tensors = (), *, timeout: float = 2.0) -> DistributedGraph:
        """Call `gradwire.autograd.graph` with this context."""
        return graph(self, roots, timeout=timeout)

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Call `gradwire.autograd.get_gradients` with this context."""
        return get_gradients(self)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


register_plain_number(ContextId)


class context:
    """A block of code whose calls to other workers are recorded, so that a backward pass can go through them.

    Calls made inside the block are recorded, including those made by threads and tasks started inside it. Each worker
    accumulates gradients in the context, separate from other contexts and from ``.grad``. At the end of the block, all
    workers free what they hold for the context. Contexts can be nested.

    Raises:
        NotInitialized: This process is not a worker.
        AutogradError: The same object was entered twice.
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
    """Compute gradients of the roots through calls to other workers, and add them to the context on each worker.

    If the pass fails on any worker, no worker adds anything. ``.grad`` is not changed.

    Args:
        context_id: The id that `context` returned.
        roots: Tensors on this worker, usually one loss.
        retain_graph: Keep the graph, so that another pass can go through it.
        gradients: One for each root; optional for scalars.
        create_graph: Record the pass itself, for gradients of gradients.
        inputs: Accumulate gradients only for these tensors on this worker.
        mode: ``"smart"`` handles results and arguments that do not contribute to the roots; ``"fast"`` does not look
            for them, and fails if there are any.
        timeout: Seconds the pass may take before it fails.
        optimizer: A `DistributedOptimizer` to step with this context as soon as the pass has succeeded.

    Raises:
        ConfigurationError: `mode`, `timeout` or `optimizer` is not valid.
        TypeError: `roots` is neither a tensor nor a sequence.
        AutogradError: Gradients cannot be computed for a root, or `gradients` or `inputs` do not fit.
        NotInitialized: This process is not a worker.
        UnknownContext: The context was released, or never existed here.
        BackwardFailed: The pass failed on this or another worker, or timed out.
        UnsettledSend: FAST mode: no gradient arrives for a message.
        OptimizerStepFailed: The pass succeeded, but some workers did not step.
    """
    if optimizer is not None and not hasattr(optimizer, "follow_backward"):
        raise ConfigurationError(
            f"optimizer must be a gradwire.optim.DistributedOptimizer, not a {type(optimizer).__name__}; call the "
            f"step() of other optimizers after backward"
        )
    options = _options(retain_graph, create_graph, inputs is not None, mode, timeout)
    on_default_streams(current_engine().backward)(context_id, options, roots, gradients, inputs)
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
    """Return gradients of outputs with respect to inputs, both on this worker, without adding them to the context.

    Args:
        context_id: The id that `context` returned.
        outputs: Tensors to differentiate.
        inputs: Tensors to differentiate with respect to.
        grad_outputs: One for each output; optional for scalars.
        retain_graph: Keep the graph; defaults to `create_graph`.
        create_graph: Record the pass itself.
        allow_unused: Return None for inputs that the outputs do not depend on.
        mode: As in `backward`.
        timeout: As in `backward`.

    Raises:
        ConfigurationError: `mode` or `timeout` is not valid.
        TypeError: `outputs` or `inputs` is neither a tensor nor a sequence.
        NotInitialized: This process is not a worker.
        AutogradError: Gradients cannot be computed for an output, or the outputs do not depend on an input.
        UnknownContext: The context was released, or never existed here.
        BackwardFailed: The pass failed on this or another worker, or timed out.
    """
    wanted = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    options = _options(create_graph if retain_graph is None else retain_graph, create_graph, True, mode, timeout)
    run = on_default_streams(current_engine().backward)
    table = run(context_id, options, outputs, grad_outputs, wanted, joins_context=False)
    results = tuple(table.get(tensor) for tensor in wanted)
    if not allow_unused and any(result is None for result in results):
        number = results.index(None)
        raise AutogradError(f"the outputs do not depend on input {number}; pass allow_unused=True to get None for it")
    hand_over(result for result in results if result is not None)
    return results


def _options(retain: bool, create: bool, skips_leaves: bool, mode: str, timeout: object) -> PassOptions:
    if mode not in ("smart", "fast"):
        raise ConfigurationError(f'mode must be "smart" or "fast", not {mode!r}')
    if not (isinstance(timeout, int | float) and timeout > 0):
        raise _wrong_timeout(timeout)
    detects_anomalies = torch.is_anomaly_enabled()
    is_special = retain or create or skips_leaves or detects_anomalies or mode != "smart"
    if timeout == DEFAULT_TIMEOUT_S and not is_special:
        return DEFAULT_OPTIONS
    return PassOptions(mode == "fast", bool(retain), bool(create), skips_leaves, detects_anomalies, float(timeout))


def _wrong_timeout(timeout: object) -> ConfigurationError:
    return ConfigurationError(f"timeout must be a positive number of seconds, not {timeout!r}")


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """Return the gradients that a context has accumulated on this worker, by leaf tensor.

    Raises:
        NotInitialized: This process is not a worker.
        UnknownContext: The context was released, or this worker does not take part in it.
        RpcTimeout: A pass has finished here, and the worker that started it did not report whether it was committed.
    """
    found = current_engine().container.retrieve(context_id).wait_gradients(DEFAULT_TIMEOUT_S)
    hand_over(found.values())
    return found


def explain(context_id: int) -> Explanation:
    """Return which worker waits for which in a context. Print the result, or use its `as_json`.

    May be called from another thread while a backward pass is running.

    Raises:
        NotInitialized: This process is not a worker.
        UnknownContext: The context was released, or this worker does not take part in it.
    """
    engine = current_engine()
    return engine.prober.explain(engine.container.retrieve(context_id))


def graph(context_id: int, roots: Tensors = (), *, timeout: float = 2.0) -> DistributedGraph:
    """Return the graph that a backward pass of a context would go through, on all its workers.

    Notebooks show the result as a picture; `to_svg`, `to_dot`, `to_mermaid` and `to_json` convert it. May be called at
    any time in the context, even from another thread while a backward pass is running.

    Args:
        context_id: The id that `context` returned.
        roots: Tensors on this worker that backward would start from, usually the loss; the graph then includes them.
        timeout: Seconds to wait for answers. Workers that do not answer are shown with what others know of them.

    Raises:
        ConfigurationError: The timeout is not a positive number.
        TypeError: `roots` is neither a tensor nor a sequence.
        NotInitialized: This process is not a worker.
        AutogradError: A root is not a tensor that requires grad.
        UnknownContext: The context was released, or this worker does not take part in it.
    """
    from gradwire.autograd.backward_pass import list_roots  # only a worker needs it

    tensors = list_roots(roots)
    if not all(isinstance(item, torch.Tensor) and item.requires_grad for item in tensors):
        raise AutogradError("roots must be tensors that require grad, on the worker that calls graph")
    limit: object = timeout
    if not (isinstance(limit, int | float) and limit > 0):
        raise _wrong_timeout(timeout)
    engine = current_engine()
    return engine.prober.graph(engine.container.retrieve(context_id), tensors, float(limit))


# -- PyTorch's functions for introspection ----------------------------------------------------------------------------------


def _new_context() -> DistAutogradContext:
    """Create a context and enter it, until `_release_context`."""
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
