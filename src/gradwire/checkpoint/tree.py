"""Values as JSON and back, exactly.

JSON has numbers, texts, lists and objects with texts as keys. Everything else that a checkpoint may hold becomes an object
with one key that starts with ``$``:

    (1, 2)            {"$tuple": [1, 2]}            nan, inf          {"$float": "nan"}
    {0: "a"}          {"$dict": [[0, "a"]]}         2**70             {"$int": "1180591620717411303424"}
    b"ab"             {"$bytes": "YWI="}            torch.float32     {"$dtype": "float32"}
    a tensor          {"$tensor": its name}         a module          {"$object": {...}}, see `object_node`
    a sharded tensor  {"$sharded": {...}}, see `sharded_node`

The format never names a class that loading would have to import. Types must match exactly: a subclass of ``int`` would be
loaded as a plain ``int``, so it is refused.

The place of a value is its *path*: the keys that lead to it, joined by ``/`` (``model/0.weight``). Paths are unique, so
they name the tensors.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from gradwire.errors import CannotSave, CheckpointDamaged
from gradwire.shard.layout import Box, find_overlap, whole

if TYPE_CHECKING:
    from gradwire.checkpoint.index import TensorEntry
    from gradwire.checkpoint.safetensors_io import TensorReader

Node = Any  # what JSON can express
Entries = Mapping[str, "TensorEntry"]
PlaceTensor = Callable[[str, torch.Tensor], str]
Claim = Callable[[str, Any], "Node | None"]

MAX_DEPTH: Final = 64
SHARDED: Final = "$sharded"
_TENSOR: Final = "$tensor"
_MAX_NODE_DEPTH: Final = 4 * MAX_DEPTH  # a value takes up to three levels of lists and dicts
_MAX_SIZE: Final = 2**62
_SAFE_INT: Final = 2**53  # other readers of JSON lose digits of larger ones
_CONTAINERS: Final[dict[type, str]] = {
    tuple: "$tuple",
    torch.Size: "$size",
    OrderedDict: "$ordered",
    Counter: "$counter",
}


def join(path: str, key: Any) -> str:
    text = str(key).replace("~", "~0").replace("/", "~1") or "~3"
    return f"{path}/{text}" if path else text


def piece_path(path: str, offsets: Sequence[int]) -> str:
    """Return the path of a piece. No user's path has this form: there, "~" is followed by a digit."""
    return f"{path}~@{','.join(map(str, offsets))}"


# -- values to nodes ----------------------------------------------------------------------------------------------------


class Encoder:
    """Converts values to nodes. `place` stores every tensor, and returns its name.

    `claim` is called with each value first; it returns its node, or None to leave the value to the encoder.
    """

    def __init__(self, place: PlaceTensor, claim: Claim | None = None) -> None:
        self._place = place
        self._claim = claim
        self._paths: set[str] = set()

    def encode(self, value: Any, path: str, depth: int = 0) -> Node:
        if depth > MAX_DEPTH:
            raise CannotSave(f"'{path}' is nested deeper than {MAX_DEPTH} levels; does it contain itself?")
        if self._claim is not None and (claimed := self._claim(path, value)) is not None:
            return claimed
        if isinstance(value, torch.Tensor):
            return {_TENSOR: self._place(path, value)}
        kind = type(value)
        if kind is dict:
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {key: self.encode(item, self._below(path, key), depth + 1) for key, item in value.items()}
            return {"$dict": self._pairs(value.items(), path, depth)}
        if kind is list:
            return self._items(value, path, depth)
        if kind in (tuple, torch.Size):
            return {_CONTAINERS[kind]: self._items(value, path, depth)}
        if kind in (OrderedDict, Counter):
            return {_CONTAINERS[kind]: self._pairs(value.items(), path, depth)}
        return _encode_scalar(value, path)

    def _pairs(self, pairs: Iterable[tuple[Any, Any]], path: str, depth: int) -> list[Node]:
        found = []
        for key, item in pairs:
            below = self._below(path, key)
            found.append([self.encode(key, f"{below} (the key)", depth + 1), self.encode(item, below, depth + 1)])
        return found

    def _items(self, items: Iterable[Any], path: str, depth: int) -> list[Node]:
        return [self.encode(item, self._below(path, number), depth + 1) for number, item in enumerate(items)]

    def _below(self, path: str, key: Any) -> str:
        """Return a unique path: ``0`` and ``"0"`` may be keys of one dict."""
        wanted = found = join(path, key)
        number = 2
        while found in self._paths:
            found = f"{wanted}~{number}"  # no other path has this form: "~" is followed by 0 or 1 there
            number += 1
        self._paths.add(found)
        return found


def _encode_scalar(value: Any, path: str) -> Node:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < _SAFE_INT else {"$int": str(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is complex:
        return {"$complex": [_encode_scalar(value.real, path), _encode_scalar(value.imag, path)]}
    if kind in (bytes, bytearray):
        return {"$" + kind.__name__: base64.b64encode(value).decode()}
    if kind is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"$device": str(value)}
    advice = "Save the values that are needed to create it again"
    if hasattr(value, "name") and hasattr(value, "value"):
        advice = "Save its .value or .name"
    elif hasattr(value, "item"):
        advice = "Save its .item()"
    raise CannotSave(
        f"'{path}' is a {kind.__module__}.{kind.__qualname__}, which cannot be saved: a value of a checkpoint must be "
        f"a tensor, a number, text, bytes, None, or a dict, list or tuple of these. {advice}"
    )


# -- nodes to values ----------------------------------------------------------------------------------------------------


def decode(node: Node, tensor_named: Callable[[str], Any] = str, source: TensorReader | None = None) -> Any:
    """Return the value of a node; objects become their state, and sharded tensors become whole.

    `tensor_named` returns the tensor of a name; by default tensors become their names. Sharded tensors are read from
    `source`; without it there must be none.
    """
    if type(node) is list:
        return [decode(item, tensor_named, source) for item in node]
    if type(node) is not dict:
        return node
    tag = tag_of(node)
    if tag is None:
        return {key: decode(item, tensor_named, source) for key, item in node.items()}
    body = node[tag]
    if tag == _TENSOR:
        return tensor_named(body)
    if tag == SHARDED:
        if source is None:
            raise CheckpointDamaged("the index has a sharded tensor where none is allowed")
        return assemble(body, source)
    if tag == "$object":
        return decode(body["state"], tensor_named, source)
    try:
        if tag in _REBUILT:
            return _REBUILT[tag]([decode(item, tensor_named, source) for item in body])
        return _SCALARS[tag](body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointDamaged(f"the index has a value of an unknown form, {tag}: {error}") from error


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if type(found) is not torch.dtype:
        raise ValueError(f"{name} is not a dtype")
    return found


_REBUILT: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "$tuple": tuple,
    "$size": torch.Size,
    "$dict": dict,
    "$ordered": OrderedDict,
    "$counter": lambda pairs: Counter(dict(pairs)),
    "$complex": lambda parts: complex(*parts),
}
_SCALARS: Final[dict[str, Callable[[Any], Any]]] = {
    "$int": int,
    "$float": float,
    "$bytes": base64.b64decode,
    "$bytearray": lambda text: bytearray(base64.b64decode(text)),
    "$dtype": _dtype,
    "$device": torch.device,
}


# -- nodes --------------------------------------------------------------------------------------------------------------


def tag_of(node: Node) -> str | None:
    if type(node) is dict and len(node) == 1:
        key: str = next(iter(node))
        return key if key.startswith("$") else None
    return None


def items_of(node: Node) -> dict[Any, Node] | None:
    """Return the nodes in a dict by their keys; None if the node is not a dict."""
    tag = tag_of(node)
    if tag in ("$dict", "$ordered"):
        try:
            return {decode(key, _refuse_tensor): item for key, item in node[tag]}
        except TypeError as error:  # a list cannot be a key
            raise CheckpointDamaged(f"the index has a dict with an invalid key: {error}") from error
    return node if type(node) is dict and tag is None else None


def _refuse_tensor(name: str) -> Any:
    raise CheckpointDamaged(f"the index has tensor '{name}' as a key")


def dict_node(items: Mapping[str, Node]) -> Node:
    """Return the node of a dict whose values are nodes."""
    if any(key.startswith("$") for key in items):
        return {"$dict": [[key, item] for key, item in items.items()]}
    return dict(items)


def object_node(kind: str, type_name: str, state: Node, metadata: Node = None) -> Node:
    """Return the node of an object that is filled when it is loaded; its metadata are the versions of modules."""
    return {"$object": {"kind": kind, "type": type_name, "state": state, "metadata": metadata}}


def tensor_names(node: Node) -> Iterator[str]:
    """Yield the names of all tensors in a node, with repeats."""
    for body in bodies(node, (_TENSOR, SHARDED)):
        yield from [body] if type(body) is str else (name for name, _ in body["pieces"])


def bodies(node: Node, tags: Sequence[str] = (SHARDED,)) -> Iterator[Any]:
    """Yield the bodies of all special nodes with some tags in a node; by default those of sharded tensors."""
    if type(node) is dict:
        tag = tag_of(node)
        if tag in tags:
            yield node[tag]
            return
        node = [*node.values()]
    for item in node if type(node) is list else ():
        yield from bodies(item, tags)


def check_node(node: Node, depth: int = 0) -> None:
    """Check the form of a node: every object has its fields, every tensor a name, every pair two items."""
    if depth > _MAX_NODE_DEPTH:
        raise ValueError("it is nested too deeply")
    if type(node) is dict:
        tag = tag_of(node)
        if tag in _FORMS:
            is_valid, problem = _FORMS[tag]
            if not is_valid(node[tag]):
                raise ValueError(problem)
        node = [*node.values()]
    for item in node if type(node) is list else ():
        check_node(item, depth + 1)


def _is_object_body(body: Any) -> bool:
    return type(body) is dict and type(body.get("kind")) is str and type(body.get("type")) is str and "state" in body


def _is_sharded_body(body: Any) -> bool:
    if type(body) is not dict or body.keys() != {"dtype", "shape", "pieces"} or type(body["dtype"]) is not str:
        return False
    return _are_ints(body["shape"], 0) and _are_pairs(body["pieces"]) and all(map(_is_piece, body["pieces"]))


def _is_piece(pair: Any) -> bool:
    return type(pair[0]) is str and _are_ints(pair[1], -_MAX_SIZE)


def _are_pairs(body: Any) -> bool:
    return type(body) is list and all(type(pair) is list and len(pair) == 2 for pair in body)


def _are_ints(value: Any, least: int) -> bool:
    return type(value) is list and all(type(item) is int and least <= item <= _MAX_SIZE for item in value)


_FORMS: Final[dict[str | None, tuple[Callable[[Any], bool], str]]] = {
    _TENSOR: (lambda body: type(body) is str, "a tensor without a name"),
    SHARDED: (_is_sharded_body, "a sharded tensor without dtype, shape and pieces"),
    "$object": (_is_object_body, "an object without kind, type and state"),
    "$dict": (_are_pairs, "a dict that is not made of pairs"),
    "$ordered": (_are_pairs, "a dict that is not made of pairs"),
}


# -- tensors, in one piece or in several ----------------------------------------------------------------------------------


def sharded_node(dtype: str, shape: Sequence[int], pieces: Sequence[tuple[str, Sequence[int]]]) -> Node:
    """Return the node of a tensor in pieces: their names, and where they begin."""
    return {SHARDED: {"dtype": dtype, "shape": list(shape), "pieces": [[name, list(start)] for name, start in pieces]}}


def is_tensor(node: Node) -> bool:
    return tag_of(node) in (_TENSOR, SHARDED)


def form_of(node: Node, entries: Entries) -> tuple[str, tuple[int, ...]]:
    if _TENSOR in node:
        entry = entries[node[_TENSOR]]
        return entry.dtype, tuple(entry.shape)
    return node[SHARDED]["dtype"], tuple(node[SHARDED]["shape"])


def region_of(node: Node, box: Box, entries: Entries) -> Node:
    """Return the node of a part of a tensor, which names only the pieces that have something of it."""
    dtype, shape = form_of(node, entries)
    if box == whole(shape):
        return node
    pieces = [(node[_TENSOR], (0,) * len(shape))] if _TENSOR in node else node[SHARDED]["pieces"]
    found = []
    for name, start in pieces:
        if Box(tuple(start), tuple(entries[name].shape)).common_with(box) is not None:
            found.append((name, [mine - outer for mine, outer in zip(start, box.offsets, strict=True)]))
    return sharded_node(dtype, box.sizes, found)


def put(target: torch.Tensor, node: Node, source: TensorReader, is_zero: bool = False) -> None:
    """Fill a tensor of the same shape; of each piece, read only what belongs into it."""
    if _TENSOR in node:
        source.read_into(target, node[_TENSOR])
        return
    outer, num_covered = whole(target.shape), 0
    found = []
    for name, start in node[SHARDED]["pieces"]:
        common = Box(tuple(start), source.shape_of(name)).common_with(outer)
        if common is not None:
            offsets = tuple(mine - begin for mine, begin in zip(common.offsets, start, strict=True))
            found.append((common, name, Box(offsets, common.sizes)))
            num_covered += common.num_elements
    if num_covered < target.numel() and not is_zero:
        target.zero_()
    for common, name, region in found:
        source.read_into(target[common.slices_in(outer)], name, region)


def assemble(body: Any, source: TensorReader) -> torch.Tensor:
    """Return a sharded tensor as a whole, with memory of its own."""
    made = torch.zeros(body["shape"], dtype=getattr(torch, body["dtype"]))  # what is not covered takes no memory yet
    put(made, {SHARDED: body}, source, is_zero=True)
    return made


def find_unlike(body: Any, entries: Entries) -> str:
    """Return why something cannot be a piece of a tensor; empty if all can."""
    for name, start in body["pieces"]:
        entry = entries[name]
        if entry.dtype != body["dtype"] or not len(start) == len(entry.shape) == len(body["shape"]):
            return f"'{name}' cannot be a piece of a tensor of {body['dtype']} with shape {body['shape']}"
    return ""


def find_problem(body: Any, entries: Entries) -> str:
    """Return why pieces do not make up a tensor; empty if they do."""
    if problem := find_unlike(body, entries):
        return problem
    outer, boxes = whole(body["shape"]), _boxes(body, entries)
    for (name, _), box in zip(body["pieces"], boxes, strict=True):
        for offset, size, length in zip(box.offsets, box.sizes, outer.sizes, strict=True):
            if offset < 0 or offset + size > length:
                return f"'{name}' reaches beyond the tensor of shape {body['shape']}"
    pair = find_overlap(boxes) if boxes else None
    return f"'{body['pieces'][pair[0]][0]}' and '{body['pieces'][pair[1]][0]}' overlap" if pair else ""


def is_covered(body: Any, entries: Entries) -> bool:
    """Return whether every element is in a piece, so that the tensor is not larger than what was saved."""
    outer = whole(body["shape"])
    inside = [box.common_with(outer) for box in _boxes(body, entries)]
    found = [box for box in inside if box is not None]
    return sum(box.num_elements for box in found) == outer.num_elements and (not found or find_overlap(found) is None)


def _boxes(body: Any, entries: Entries) -> list[Box]:
    return [Box(tuple(start), tuple(entries[name].shape)) for name, start in body["pieces"]]
