"""What drivers ask of owners: called by name, with plain data, at every trust level.

Every worker that holds a reference to an owner's part can ask for any of this, with any data. Types, counts and names are
compared with the classes below before anything is done; what has to fit the parameters is checked by `LocalOptimizer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import torch

from gradwire.errors import ConfigurationError, DecodeError, NotExposed
from gradwire.optim.edits import Edit
from gradwire.optim.local import LocalOptimizer, OwnedGroup
from gradwire.rpc.functions import expose
from gradwire.rref import RRef
from gradwire.rref.operations import find_value
from gradwire.shard.torch_optimizer import is_torchs
from gradwire.wire.messages import read_plain

MAKE: Final = "gradwire.optim.make"
OPERATE: Final = "gradwire.optim.operate"

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Id = Annotated[int, msgspec.Meta(ge=0)]
_ContextIds = Annotated[tuple[_Id, ...], msgspec.Meta(min_length=1)]
_Edits = Annotated[tuple[Edit, ...], msgspec.Meta(max_length=64)]
_Options = dict[str, Any]
_Groups = Annotated[list[tuple[_Number, list[str], list[Any], _Options]], msgspec.Meta(min_length=1)]
_Sizes = Annotated[tuple[_Number, ...], msgspec.Meta(max_length=64)]


class _Order(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The arguments of an operation, in order."""

    def __post_init__(self) -> None:
        ids = (*getattr(self, "context_ids", ()), getattr(self, "pass_id", 0))
        if max(ids) >> 64:  # msgspec cannot say it
            raise ValueError("an id of more than 64 bits")


class _Nothing(_Order):
    pass


class _AddGroups(_Order):
    groups: _Groups


class _RemoveGroups(_Order):
    first: _Number


class _Step(_Order):
    step_id: _Number
    context_ids: _ContextIds
    pass_id: _Id = 0
    options: dict[int, _Options] | None = None
    edits: _Edits = ()


class _IsFinite(_Order):
    context_ids: _ContextIds
    edits: _Edits


class _Norms(_Order):
    context_ids: _ContextIds
    edits: _Edits
    norm_type: float


class _ZeroGrad(_Order):
    set_to_none: bool


class _NamedState(_Order):
    is_copied: bool = False


class _StateProblems(_Order):
    forms: dict[str, dict[str, tuple[_Sizes, bool] | str]]


class _LoadNamedState(_Order):
    state: dict[str, dict[Any, Any]]


class _Make(_Order):
    optimizer_class: Any
    groups: _Groups
    args: tuple[Any, ...]
    kwargs: _Options


ORDERS: Final[Mapping[str, type[_Order]]] = {
    "add_groups": _AddGroups,
    "describe": _Nothing,
    "is_finite": _IsFinite,
    "load_named_state": _LoadNamedState,
    "named_state": _NamedState,
    "norms": _Norms,
    "remove_groups": _RemoveGroups,
    "state_problems": _StateProblems,
    "step": _Step,
    "zero_grad": _ZeroGrad,
}
"""Operations of `LocalOptimizer`, and their arguments."""

_ANSWERS: Final[Mapping[str, Any]] = {
    "add_groups": tuple[_Options, dict[int, _Options]],
    "describe": tuple[_Options, dict[int, _Options]],
    "is_finite": bool,
    "load_named_state": None,
    "named_state": dict[str, dict[Any, Any]],
    "norms": list[tuple[list[str], Any]],
    "remove_groups": None,
    "state_problems": list[str],
    "step": int,
    "zero_grad": None,
}


def read_answer(operation: str, answer: Any) -> Any:
    """Return what an owner has answered, if it is an answer to that operation.

    Raises:
        DecodeError: It is something else.
    """
    return read_plain(answer, _ANSWERS[operation], f"not the answer to {operation!r}")


def _make(optimizer_class: Any, groups: Any, args: Any, kwargs: Any) -> LocalOptimizer:
    """Makes an owner's part; a class of torch is called by its name."""
    order = read_plain((optimizer_class, groups, args, kwargs), _Make, "not an order to make an optimizer")
    found = order.optimizer_class
    if isinstance(found, str):
        found = getattr(torch.optim, found, None)
        if not isinstance(found, type) or not is_torchs(found) or found is torch.optim.LBFGS:
            raise ConfigurationError(
                f"torch.optim has no optimizer of that name here that works on several workers: {order.optimizer_class!r}"
            )
    if not isinstance(found, type):
        raise ConfigurationError(f"not a class of optimizers: {found!r}")
    return LocalOptimizer(found, _groups(order.groups), order.args, order.kwargs)


def _operate(rref_id: Any, maker: Any, operation: Any, *args: Any) -> Any:
    """Has an owner do one of the above."""
    kind = ORDERS.get(operation) if isinstance(operation, str) else None
    if kind is None:
        raise NotExposed(f"{operation!r} is nothing that optimizers do")
    order = read_plain(args, kind, f"not the arguments of {operation!r}")
    if isinstance(order, _AddGroups):
        _groups(order.groups)
    optimizer = find_value(rref_id, maker)
    if not isinstance(optimizer, LocalOptimizer):
        raise NotExposed(f"{operation!r} is nothing that optimizers do")
    return getattr(optimizer, operation)(*(getattr(order, field) for field in order.__struct_fields__))


def _groups(groups: Sequence[Any]) -> list[OwnedGroup]:
    """Looks at what types alone cannot say.

    Raises:
        DecodeError: There are not as many names as references, or a reference is none.
    """
    for _, names, rrefs, _ in groups:
        if len(names) != len(rrefs) or not all(isinstance(rref, RRef) for rref in rrefs):
            raise DecodeError("a group of parameters needs a name and a reference for each")
    return list(groups)


for _function, _name in ((_make, MAKE), (_operate, OPERATE)):
    expose(_function, name=_name)
