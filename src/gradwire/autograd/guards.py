"""Parameters that contexts share, and how: who has used them, and what became of the memory they saw.

A parameter's memory is a *cell*. As long as nobody else needs its values, a step changes them in place. If another context
does, the step moves the parameter to a new cell first; the old one keeps its values for those who saw them.

    context A   forward, saw cell 1 .......................... backward: values of cell 1
    context B          forward, saw cell 1   backward   step: parameter moves to cell 2, which is changed
"""

from __future__ import annotations

import collections
import functools
import threading
import weakref
from collections.abc import Container, Iterable
from typing import Any, Literal, get_args

import torch

from gradwire.autograd._turns import Turns
from gradwire.autograd.context import DistAutogradContext
from gradwire.errors import ConfigurationError

Mode = Literal["snapshot", "serialize", "hogwild"]

_MODES = get_args(Mode)

lock = threading.RLock()  # guards the tables below, all Turns and all users
changed = threading.Condition(lock)  # told when somebody may go on
_guarded: dict[int, Guarded] = {}  # by id of the parameter
_by_memory: dict[int, list[Guarded]] = {}  # by address of its memory
_gone: collections.deque[Guarded] = collections.deque()  # filled by finalizers


class Group:
    """Parameters that were guarded together."""

    __slots__ = ("__weakref__", "mode", "turns")

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.turns = Turns()

    def __repr__(self) -> str:
        return f"<Group {self.mode}: {self.turns!r}>"


EVERYTHING = Group("snapshot")
"""What calls read that may use anything."""


class Cell:
    """Memory that a parameter has, or had.

    Args:
        param: The parameter.
    """

    __slots__ = ("_last_version", "_ref")

    def __init__(self, param: weakref.ref[torch.Tensor]) -> None:
        self._ref = param
        self._last_version: int | None = None

    @property
    def version(self) -> int | None:
        """Counts changes in place of the values; None when nobody can change them any more and nobody did."""
        if self._last_version is not None:
            return self._last_version
        param = self._ref()
        return param._version if param is not None else None

    def leave(self, version: int) -> None:
        """The parameter has moved elsewhere: from now on the values stay as they are."""
        self._last_version = version


class Guarded:
    """One parameter that contexts share.

    Attributes:
        group: What it was guarded with.
        cell: Its memory.
        users: Contexts on this worker that have used its memory and have not stepped since. The list is replaced, never
            changed, so it may be looked at without the lock.
    """

    __slots__ = ("_address", "_ref", "cell", "group", "users")

    def __init__(self, param: torch.Tensor, group: Group) -> None:
        self.group = group
        self.users: list[weakref.ref[DistAutogradContext]] = []
        self._ref = weakref.ref(param, functools.partial(_forget, id(param)))
        self.cell = Cell(self._ref)
        self._address = 0
        self.locate(param)

    def locate(self, param: torch.Tensor) -> None:
        """Notes where the parameter's memory is."""
        now = address_of(param)
        if now == self._address:
            return
        self.leave()
        self._address = now
        if now:
            _by_memory.setdefault(now, []).append(self)

    def leave(self) -> None:
        """The parameter's memory is not where it was, or the parameter is gone."""
        known = _by_memory.get(self._address)
        if known is not None and self in known:
            known.remove(self)
            if not known:
                del _by_memory[self._address]
        self._address = 0

    def cell_at(self, address: int) -> Cell | None:
        """The cell that is at an address, if the parameter's memory is still there."""
        cell, param = self.cell, self._ref()
        return cell if param is not None and address_of(param) == address else None

    def is_of(self, param: torch.Tensor) -> bool:
        """Whether this is that parameter's."""
        return self._ref() is param

    def users_except(self, own: Container[int]) -> list[weakref.ref[DistAutogradContext]]:
        """The users that are not over, but for some, by the ids of their contexts."""
        return [
            user
            for user in self.users
            if (context := user()) is not None and context.released is None and context.context_id not in own
        ]

    def move(self, param: torch.Tensor) -> None:
        """Gives the parameter new memory with the same values; the old one stays as it is."""
        before = self.cell
        param.data = param.data.clone()  # first: whoever finds it at its old address has found its old cell before
        with lock:
            before.leave(param._version)
            self.cell = Cell(self._ref)
            self.users = []  # what they saw is safe
            self.locate(param)


def check_mode(mode: str) -> None:
    """
    Raises:
        ConfigurationError: There is no such mode.
    """
    if mode not in _MODES:
        raise ConfigurationError(f"concurrency must be one of {', '.join(_MODES)}, not {mode!r}")


def guard(params: Iterable[torch.Tensor], mode: Mode) -> Group:
    """See `gradwire.autograd.sharing.guard`."""
    check_mode(mode)
    group = Group(mode)
    with lock:
        while _gone:
            _gone.popleft().leave()
        for param in params:
            known = _guarded.get(id(param))
            if known is None or not known.is_of(param):
                _guarded[id(param)] = Guarded(param, group)
            else:
                known.locate(param)
                group = known.group if known.group.mode == mode else group
    return group


def find(param: torch.Tensor) -> Guarded | None:
    """What is known about a parameter."""
    known = _guarded.get(id(param))
    return known if known is not None and known.is_of(param) else None


def find_all(params: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, Guarded]]:
    """What is known about parameters; those that nobody guarded are from now on, as ``"snapshot"``."""
    todo = list(params)
    with lock:
        found = [(param, item) for param in todo if (item := _guarded.get(id(param))) is not None and item.is_of(param)]
        if len(found) != len(todo):
            guard(todo, "snapshot")
            return find_all(todo)
        for param, item in found:
            item.locate(param)
    return found


def find_by_memory(tensor: torch.Tensor) -> list[tuple[Guarded, Cell]]:
    """The parameters whose memory a tensor has; more than one if they are parts of one buffer."""
    address = address_of(tensor)
    known = _by_memory.get(address)
    if known is None:
        return []
    return [(item, cell) for item in list(known) if (cell := item.cell_at(address)) is not None]


def has_any() -> bool:
    """Whether any parameter of this process is guarded."""
    return bool(_guarded)


def address_of(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins; 0 if it has none of its own kind."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, or a lazy module's before its first call
        return 0


def _forget(key: int, ref: weakref.ref[Any]) -> None:
    """A parameter is gone. Runs in finalizers, so it takes no lock: single operations only."""
    known = _guarded.get(key)
    if known is not None and known._ref is ref:
        _guarded.pop(key, None)
        _gone.append(known)
