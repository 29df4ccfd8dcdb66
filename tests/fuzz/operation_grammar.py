"""Values for operations: what an honest worker would send, and the same with something wrong in it.

The shape of a value comes from the types that the receiver declares: annotations and names of parameters, and fields of
msgspec structs. So an operation or a field that is new is fuzzed without anybody listing it here.
"""

from __future__ import annotations

import copy
import inspect
import random
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import torch

from gradwire.checkpoint import owner as checkpoint_owners
from gradwire.optim.local import LocalOptimizer
from gradwire.rref.owner import Creates
from gradwire.wire import plain as _registry
from gradwire.wire.messages import _note_decoders

KEEPERS: Final[dict[str, Any]] = {"rref": Creates}
"""What goes with calls whose results stay where they are made."""

WRONG: Final[tuple[Any, ...]] = (
    *(0, 1, -1, 2, 3, 255, 2**16, 2**31, 2**32, 2**48, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(None, True, False, 0.0, 1.5, -1.0, float("nan"), float("inf"), -float("inf")),
    *("", "x", "w" * 2000, "a\x00b", "\n", "meta", "cuda:0", "cpu", "../../etc/passwd", "/etc/passwd", "__class__"),
    *(b"", b"x" * 100, [], [1], [[]], [[[[]]]], (), (1, 2), {}, {"a": 1}, {"": {}}),
)
"""Takes the place of anything."""

WRONG_OBJECTS: Final[tuple[Any, ...]] = (
    *(2**80, -(2**80), {1: 2}, {None: None}, {1, 2}, frozenset(), slice(1, 2), range(3), 1j, bytearray(b"x")),
    *(torch.float32, torch.device("meta"), torch.Size([2, 3]), torch.strided, torch.channels_last),
)
"""The same where a value may be anything that can travel, and not only what msgpack knows."""

NAMES: Final = (
    *("fuzz.Layer", "fuzz.echo", "fuzz.double", "gradwire.nn.make", "gradwire.rref.fetch", "os:system", "", "forward"),
    *("scaled", "weight", "__init__", "SGD", "Adam", "Optimizer", "step", "describe", "named_state", "zero_grad"),
    *("train", "to", "type", "requires_grad_", "parameters", "buffers", "snapshot", "serialize", "hogwild", "cpu"),
    *("forward_pre", "full_backward", "add_groups", "load_named_state", "remove_groups", "norms", "is_finite"),
)


@dataclass
class Pools:
    """What the hostile worker knows of: its own ids, and those of others that it has guessed.

    Attributes:
        contexts: Ids of contexts.
        passes: Ids of backward passes.
        messages: Ids of recorded messages.
        values: Ids of values.
        forks: Ids of references.
        workers: Rank and incarnation.
        directory: Where the victim may write checkpoints.
    """

    contexts: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    forks: list[int] = field(default_factory=list)
    workers: list[tuple[int, int]] = field(default_factory=list)
    directory: str = ""


class Forged:
    """An instance of a registered class, made of any fields."""

    name: str

    def __init__(self, fields: list[Any]) -> None:
        self.fields = fields

    def __repr__(self) -> str:
        return f"<{self.name} of {self.fields!r}>"


def _forge(name: str) -> type[Forged]:
    made = type(f"Forged_{name}", (Forged,), {"name": name})
    _registry.BY_KIND[made] = _registry.PlainClass(made, name, lambda value: value.fields, lambda fields: None)
    return made


FORGED: Final = [_forge(name) for name in list(_registry.BY_NAME) if name.startswith("gradwire.")]


class Grammar:
    """Makes values.

    Args:
        rng: Where they come from.
        pools: Ids that mean something.
        references: Real references of the hostile worker.
    """

    def __init__(self, rng: random.Random, pools: Pools, references: Callable[[], Iterable[Any]]) -> None:
        self.rng = rng
        self.pools = pools
        self._references = references

    # -- notes -------------------------------------------------------------------------------------------------------

    def note(self, kind: Any) -> Any:
        """A note of that type, maybe with something wrong in it."""
        made = self._of_type(msgspec.inspect.type_info(kind), "")
        return self.spoil(made, WRONG) if self.rng.random() < 0.5 else made

    def any_note(self) -> Any:
        """A note of any type that workers know."""
        return self.note(self.rng.choice([kind for kind in _note_decoders if kind is not Any]))

    def _of_type(self, info: Any, name: str) -> Any:
        rng, kinds = self.rng, msgspec.inspect
        match info:
            case kinds.StructType():
                fields = [self._of_type(item.type, item.name) for item in info.fields]
                tag = [] if info.tag is None else [info.tag]
                if info.array_like:
                    return [*tag, *fields]
                return dict(zip([item.encode_name for item in info.fields], fields, strict=True))
            case kinds.UnionType():
                return self._of_type(rng.choice(info.types), name)
            case kinds.IntType():
                return self.integer(name)
            case kinds.FloatType():
                return rng.choice((0.0, 0.01, 1.0, 600.0, 1e300))
            case kinds.BoolType():
                return rng.random() < 0.5
            case kinds.StrType():
                return rng.choice((*NAMES, "builtins:ValueError", "v", "h", "bfloat16", "on worker v at x.py:1"))
            case kinds.LiteralType():
                return rng.choice(info.values)
            case kinds.BytesType():
                return rng.choice((b"", b"\x92\x90\x80", rng.randbytes(20)))
            case kinds.TupleType() if name in ("to", "sender", "dead", "maker") and rng.random() < 0.9:
                return list(rng.choice(self.pools.workers))
            case kinds.TupleType():
                return [self._of_type(item, name) for item in info.item_types]
            case kinds.VarTupleType() | kinds.ListType():
                return [self._of_type(info.item_type, name) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
            case kinds.DictType():
                count = rng.choice((0, 1, 2))
                keys = [_as_key(self._of_type(info.key_type, name)) for _ in range(count)]
                return {key: self._of_type(info.value_type, name) for key in keys}
            case kinds.NoneType():
                return None
            case _:
                return rng.choice(WRONG)

    def integer(self, name: str) -> int:
        """A number for a field of that name."""
        rng, pools = self.rng, self.pools
        known: list[int] = []
        if "context" in name:
            known = pools.contexts
        elif "pass" in name:
            known = pools.passes
        elif "rref" in name:
            known = pools.values
        elif "fork" in name:
            known = pools.forks
        elif name in ("message_id", "recorded_id", "has", "expects", "shortcuts", "call_id"):
            known = pools.messages
        elif name in ("to", "sender", "dead", "maker", "peers", "absent", "via", "incarnation", "known_workers"):
            known = [number for item in pools.workers for number in item]
        if known and rng.random() < 0.85:
            return rng.choice(known)
        rank = rng.choice((0, 1, 2, 3, 65_535))
        return rng.choice((rng.randrange(8), (rank << 48) | rng.getrandbits(48), (1 << 48) | rng.randrange(1, 4)))

    # -- arguments ---------------------------------------------------------------------------------------------------

    def arguments(self, function: Callable[..., Any], skip: int = 0) -> tuple[Any, ...]:
        """Arguments for a function, by the names and annotations of its parameters; maybe with something wrong."""
        rng, made = self.rng, []
        parameters = list(inspect.signature(function).parameters.values())[skip:]
        names = [parameter.name for parameter in parameters]
        for parameter in parameters:
            if parameter.kind is parameter.VAR_POSITIONAL:
                method = getattr(LocalOptimizer, str(made[-1]), None) if "operation" in names else None
                if method is not None and rng.random() < 0.8:
                    made += self.arguments(method, skip=1)
                else:
                    made += [self.value() for _ in range(rng.choice((0, 1, 1, 2)))]
            elif parameter.kind is not parameter.VAR_KEYWORD:
                made.append(self._argument(parameter.name, str(parameter.annotation)))
        kind = rng.random()
        if kind < 0.4:
            spoiled = self.spoil(made, WRONG + WRONG_OBJECTS)
            made = spoiled if isinstance(spoiled, list) else [spoiled]
        elif kind < 0.45:
            made = made[: rng.randrange(len(made) + 1)]
        elif kind < 0.5:
            made.append(self.value())
        return tuple(made)

    def _argument(self, name: str, annotation: str) -> Any:
        rng = self.rng
        if name == "maker" or "Worker" in annotation:
            return None if rng.random() < 0.7 else rng.choice(self.pools.workers)
        if name == "call_id":
            return rng.randrange(2000)
        if name in ("directory", "path", "folder"):
            return rng.choice((self.pools.directory, "/etc", "..", self.pools.directory + "/../x"))
        if name == "order":  # of a checkpoint: JSON
            kind = rng.choice(list(checkpoint_owners._decoders))
            return _as_json(self.note(kind))
        if name == "sent":
            parts = range(rng.choice((0, 1, 1, 2)))
            return [(rng.choice(NAMES), rng.choice(NAMES), self._reference(), ("weight",)) for _ in parts]
        if name == "groups":
            return [(rng.randrange(4), ["weight"], [self._reference()], {"lr": 0.1}) for _ in range(rng.choice((1, 2)))]
        if "int" in annotation and "str" not in annotation and "list" not in annotation.lower():
            return self.integer(name)
        if "context" in name:
            return tuple(self.integer(name) for _ in range(rng.choice((0, 1, 2))))
        if annotation.startswith("str") or name in ("kind", "mode", "device", "operation", "name"):
            return rng.choice(NAMES)
        if "module_cls" in name or "function" in name or "class" in name:
            return rng.choice((*NAMES, self.value()))
        if annotation.startswith("bool"):
            return rng.random() < 0.5
        if annotation.startswith("float"):
            return rng.choice((0.0, 0.01, 1.0))
        if annotation.startswith("tuple") or name == "args":
            return tuple(self.value() for _ in range(rng.choice((0, 0, 1, 2))))
        if "list[str]" in annotation:
            return sorted(rng.sample(["h", "m", "v", "x"], rng.choice((1, 2, 3))))
        if annotation.startswith("dict") or name in ("kwargs", "options", "metadata", "state"):
            return {rng.choice(NAMES): self.value() for _ in range(rng.choice((0, 0, 1, 2)))}
        return self.value()

    def value(self, depth: int = 3) -> Any:
        """Anything that can travel."""
        rng = self.rng
        kind = rng.randrange(12 if depth > 0 else 7)
        if kind < 2:
            return self.tensor()
        if kind == 2:
            return rng.choice(WRONG + WRONG_OBJECTS)
        if kind == 3:
            return rng.choice(NAMES)
        if kind == 4:
            return self.integer(rng.choice(("context_id", "pass_id", "rref_id", "fork_id", "message_id", "rank")))
        if kind == 5:
            return self._reference()
        if kind == 6:
            return self.forged()
        if kind in (7, 8):
            return [self.value(depth - 1) for _ in range(rng.randrange(4))]
        if kind == 9:
            return tuple(self.value(depth - 1) for _ in range(rng.randrange(4)))
        return {rng.choice(NAMES): self.value(depth - 1) for _ in range(rng.randrange(3))}

    def _reference(self) -> Any:
        return self.rng.choice([*self._references(), None, self.forged()])

    def tensor(self) -> torch.Tensor:
        """A tensor of one of many shapes and types."""
        rng = self.rng
        shape = rng.choice(((), (0,), (1,), (3,), (3, 3), (2, 3), (1, 1, 1, 1, 1)))
        dtype = rng.choice((torch.float32, torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64))
        made = torch.zeros(shape, dtype=dtype)
        if dtype is torch.float32 and rng.random() < 0.2:
            made.fill_(float("nan"))
        if made.dim() == 2 and rng.random() < 0.2:
            return made.to_sparse()
        return made.requires_grad_() if made.is_floating_point() and rng.random() < 0.5 else made

    def forged(self) -> Forged:
        """An instance of a registered class, of fields that fit or do not."""
        rng, pools = self.rng, self.pools
        kind = rng.choice(FORGED)
        reference = [
            *(self.integer("rref_id"), self.integer("fork_id")),
            *(rng.choice(pools.workers), rng.choice(pools.workers)),
            rng.choice((None, *pools.workers)),
        ]
        fields: list[Any] = {
            "gradwire.RRef": reference,
            "gradwire.RemoteModule": ["v", "cpu", _forged_reference(reference), "Layer", True],
            "gradwire.ShardedTensor": [
                ([3], [([0], [3], "v/cpu")], torch.float32, False, False, [0, ["v/cpu"]]),
                [_forged_reference(reference)],
                *(False, None, False),
            ],
            "gradwire.function": [b"\x80\x04N."],
        }.get(kind.name, [self.integer(""), "x"])
        spoiled = self.spoil(fields, WRONG + WRONG_OBJECTS) if rng.random() < 0.6 else fields
        return kind(spoiled if isinstance(spoiled, list) else [spoiled])

    # -- something wrong -----------------------------------------------------------------------------------------------

    def spoil(self, value: Any, wrong: tuple[Any, ...]) -> Any:
        """The value with one to three things in it replaced, taken away, repeated or added."""
        made = copy.copy(value)
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            made = self._spoil_once(made, wrong)
        return made

    def _spoil_once(self, value: Any, wrong: tuple[Any, ...]) -> Any:
        rng = self.rng
        if isinstance(value, list | tuple) and value and rng.random() < 0.9:
            items, place = list(value), rng.randrange(len(value))
            kind = rng.random()
            if kind < 0.75:
                items[place] = self._spoil_once(items[place], wrong)
            elif kind < 0.85:
                del items[place]
            elif kind < 0.95:
                items.insert(place, items[place])
            else:
                items.append(rng.choice(wrong))
            return type(value)(items) if type(value) in (list, tuple) else items
        if type(value) is dict and value and rng.random() < 0.9:
            key = rng.choice(list(value))
            return {**value, key: self._spoil_once(value[key], wrong)}
        if type(value) is int and rng.random() < 0.3:
            return rng.choice((value + 1, value - 1, -value, value ^ (1 << rng.randrange(63))))
        return rng.choice(wrong)


def _as_key(value: Any) -> Any:
    """That value, or one like it, as the key of a map."""
    if isinstance(value, list | tuple):
        return tuple(_as_key(item) for item in value)
    return str(value) if isinstance(value, dict) else value


def _forged_reference(fields: list[Any]) -> Forged:
    return next(kind for kind in FORGED if kind.name == "gradwire.RRef")(fields)


def _as_json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError):
        return b"[]"


def encodable(note: Any) -> bool:
    """Whether a note can be put into a message: msgpack has no integers of more than 64 bits."""
    try:
        msgspec.msgpack.encode(note)
    except (TypeError, ValueError, OverflowError, struct.error):
        return False
    return True
