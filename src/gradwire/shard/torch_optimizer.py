"""Drives torch's optimizers: makes, calls and steps them, and loads their state.

The code that torch runs around every step for hooks and profilers takes longer than a small step itself. It is skipped while
there are none; the results are the same.

Torch wraps `add_param_group`, `state_dict`, `load_state_dict` and `zero_grad` in a guard that keeps its compiler from
tracing them, and imports the compiler (`torch._dynamo`: seconds, and 70 MB) to do so. Without the compiler in the process
nothing traces them, so until it is loaded the functions inside are called instead.

Fused kernels of torch trust that state and gradients have the shape and the strides of their parameter, and read and write
beyond the end of those that do not. So this is checked for every state before any of it is loaded (`load_state`), and
gradients are laid out like their parameter (`laid_out_like`).
"""

from __future__ import annotations

import inspect
import numbers
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer

from gradwire._torch import has_global_optimizer_hooks, is_profiler_enabled, optimizer_hooks
from gradwire.errors import ConfigurationError
from gradwire.types import is_class
from gradwire.wire.devices import move_all

Values = Mapping[str, Any]
"""State of one parameter."""
Form = tuple[tuple[int, ...], bool] | str
"""Of a tensor, its shape, and whether its numbers are complex; of other values, the name of their type."""

_TORCHS: Final = tuple(
    found
    for found in vars(torch.optim).values()
    if is_class(found) and issubclass(found, Optimizer) and found is not Optimizer
)
_TORCHS_WRAPPERS: Final = ("torch.optim.optimizer", "torch.utils._contextlib")
_MAX_NUMBERS: Final = 16  # in one option, such as betas
_ONE_NUMBER: Final = frozenset(("eta", "mu", "mu_product", "step"))
_LIKE_PARAMETER: Final = frozenset((
    "acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev",
    "square_avg", "step_size", "sum", "variance",
))  # fmt: skip
_REDUCED_DIM: Final = {"row_var": -1, "col_var": -2}  # Adafactor's: like the parameter, with one dimension of size 1
KNOWN_STATE: Final = _ONE_NUMBER | _LIKE_PARAMETER | _REDUCED_DIM.keys()
"""All names of tensors in the state of torch's optimizers, but for LBFGS, which is not used here."""


def is_torchs(optimizer_class: type[Any]) -> bool:
    return optimizer_class in _TORCHS


def is_option(value: Any) -> bool:
    """Return whether a value can be an option of one of torch's optimizers: a number, flag or text, or a few of these."""
    if isinstance(value, list | tuple):
        return (
            len(value) <= _MAX_NUMBERS
            and not any(isinstance(item, list | tuple) for item in value)
            and all(map(is_option, value))
        )
    if isinstance(value, torch.Tensor):
        return value.layout is torch.strided and value.dim() <= 1 and value.numel() == 1
    return value is None or isinstance(value, str | numbers.Number)


def make_optimizer(optimizer_class: type[Any], params: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return ``optimizer_class(params, *args, **kwargs)``, without importing torch's compiler where that can be avoided."""
    add_group = _inside(optimizer_class, "add_param_group")
    is_made_plainly = type(optimizer_class) is type and not any(
        "__new__" in vars(k) for k in optimizer_class.__mro__[:-1]
    )
    if add_group is None or not is_made_plainly:
        return optimizer_class(params, *args, **kwargs)
    made: Any = object.__new__(optimizer_class)
    made.add_param_group = add_group.__get__(made)
    try:
        made.__init__(params, *args, **kwargs)
    finally:
        vars(made).pop("add_param_group", None)
    return made


def method_of(optimizer: Any, name: str) -> Callable[..., Any]:
    """Return a method of an optimizer; while torch's compiler is not loaded, without the guard against it."""
    inside = None if name in vars(optimizer) else _inside(type(optimizer), name)
    found: Callable[..., Any] = getattr(optimizer, name) if inside is None else inside.__get__(optimizer)
    return found


def _inside(optimizer_class: type[Any], name: str) -> Any:
    """Return the function inside torch's guard; None if there is no guard, or the compiler is loaded."""
    known: Any = getattr(optimizer_class, name, None)
    is_guard = known is getattr(Optimizer, name) and known.__globals__["__name__"] == "torch._compile"
    return known.__wrapped__ if is_guard and "torch._dynamo" not in sys.modules else None


def is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks or a profiler observe the steps of an optimizer."""
    return bool(
        optimizer_hooks(optimizer, "step_pre")
        or optimizer_hooks(optimizer, "step_post")
        or has_global_optimizer_hooks()
        or is_profiler_enabled()
    )


def quick_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the step function of one of torch's optimizers, to be called with grad mode off."""
    if optimizer.defaults.get("differentiable"):  # it turns grad mode on
        return optimizer.step
    kind = type(optimizer)
    known = kind.step
    bare = inspect.unwrap(known, stop=_is_user_function)

    def step(closure: Callable[[], Any] | None = None) -> Any:
        # Schedulers and others may have replaced it meanwhile.
        if kind.step is not known or "step" in optimizer.__dict__ or is_watched(optimizer):
            return optimizer.step() if closure is None else optimizer.step(closure)
        return bare(optimizer, closure)

    return step


def _is_user_function(function: Any) -> bool:
    return function.__globals__["__name__"] not in _TORCHS_WRAPPERS


def load_state(
    optimizer: Any,
    state: Mapping[torch.Tensor, Values],
    names: Mapping[torch.Tensor, str],
    options: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Replace the state of all parameters of an optimizer.

    Parameters that are not in `state` have none afterwards. `options` are those of the groups, if they are to be replaced,
    too. If the state is not that of these parameters and this optimizer, nothing has changed.
    """
    fitting = {item: fit_state(type(optimizer), item, values, names.get(item, "")) for item, values in state.items()}
    packed = method_of(optimizer, "state_dict")()
    numbers = dict(zip(_flat(optimizer.param_groups), _flat(packed["param_groups"]), strict=True))
    packed["state"] = {numbers[item]: values for item, values in fitting.items()}
    if options is not None:
        pairs = zip(options, packed["param_groups"], strict=True)
        packed["param_groups"] = [{**new, "params": group["params"]} for new, group in pairs]
    # Torch replaces them first, and then looks at what is in them.
    before = optimizer.state, optimizer.param_groups
    try:
        method_of(optimizer, "load_state_dict")(packed)
    except Exception as error:
        optimizer.state, optimizer.param_groups = before
        raise ConfigurationError(
            f"the state is not one of {type(optimizer).__name__}: {type(error).__name__}: {error}"
        ) from error


def fit_state(optimizer_class: type[Any], parameter: torch.Tensor, values: Any, name: str) -> dict[str, Any]:
    """Return the state of a parameter with every tensor laid out as torch's kernels expect it."""
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"the state of parameter {name!r} is not a dict")
    if not issubclass(optimizer_class, _TORCHS):
        return dict(values)
    made = {}
    for key, value in values.items():
        problem = state_problem(optimizer_class, parameter, key, form_of(value))
        if problem:
            raise ConfigurationError(f"state {key!r} of parameter {name!r} {problem}. Load the state of the same model")
        is_tensor = isinstance(value, torch.Tensor) and key in _LIKE_PARAMETER
        made[key] = laid_out_like(parameter, value.detach()) if is_tensor else value
    return made


def beside(parameter: torch.Tensor, values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the state of a parameter on its device, where torch puts it when it is loaded: all but the number of steps."""
    return {key: value if key == "step" else move_all(value, parameter.device) for key, value in values.items()}


def form_of(value: Any) -> Form:
    """Return what `state_problem` has to know of a value."""
    return (tuple(value.shape), value.is_complex()) if isinstance(value, torch.Tensor) else type(value).__name__


def state_problem(optimizer_class: type[Any], parameter: torch.Tensor, key: str, form: Form) -> str:
    """Return why a value cannot be in the state of a parameter; empty if it can.

    Classes that do not come from torch's know themselves what they keep; what is unknown to torch's is not read by them.
    """
    if key not in KNOWN_STATE or not issubclass(optimizer_class, _TORCHS):
        return ""
    if isinstance(form, str):
        is_fine = form == "NoneType" or (key in _ONE_NUMBER and form in ("int", "float"))
        return "" if is_fine else f"is a {form}, not a tensor"
    shape, is_complex = form
    if key in _ONE_NUMBER:
        return "" if list(shape) in ([], [1]) else f"has shape {list(shape)}, and must be one number"
    expected = list(parameter.shape)
    if key in _REDUCED_DIM and len(expected) > 1:
        expected[_REDUCED_DIM[key]] = 1
    if list(shape) != expected:
        return f"has shape {list(shape)}, and must have {expected}"
    if is_complex != parameter.is_complex():
        return f"is {'complex' if is_complex else 'real'}, and the parameter is not"
    return ""


def laid_out_like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the parameter's shape with the strides that torch gives to state; a copy if it has others."""
    if value.layout is not torch.strided or value.stride() == torch.empty_like(parameter, device="meta").stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)


def _flat(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    return [item for group in groups for item in group["params"]]
