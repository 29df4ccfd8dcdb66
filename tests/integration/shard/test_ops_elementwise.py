"""Every function that works element by element, in both worlds, against the same function of plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from closeness import assert_close
from gradwire.shard import ShardedTensor, dispatch
from gradwire.shard.ops import pointwise
from gradwire.shard.ops.pointwise import FUNCTIONS
from shard.worlds import World, Worlds

SIZE = (7, 5)

# What to call a function with: tensors of numbers between 0 and 1 ("unit"), over 1 ("large"), integers, bools; or values.
DEFAULT = dict.fromkeys(pointwise.UNARY.split(), ("unit",))
DEFAULT |= dict.fromkeys(pointwise.BINARY.split(), ("unit", "unit"))
DEFAULT |= {f"__{name}__": ("unit", "unit") for name in pointwise.OPERATORS.split()}
DEFAULT |= {f"__{name}__": ("unit", "unit") for name in pointwise.OPERATORS_IN_PLACE.split()}
DEFAULT |= dict.fromkeys(pointwise.CONVERSIONS.split(), ("large",))
SPECIAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(["acosh", "arccosh"], ("large",)),
    **dict.fromkeys(["clamp", "clip"], ("unit", 0.3, 0.6)),
    **dict.fromkeys(["clamp_max", "clamp_min"], ("unit", 0.5)),
    **dict.fromkeys(["__abs__", "__neg__", "__pos__"], ("unit",)),
    **dict.fromkeys(["bitwise_not", "__invert__"], ("integers",)),
    **dict.fromkeys(["logical_and", "logical_or", "logical_xor"], ("bools", "bools")),
    **dict.fromkeys(["clone", "contiguous"], ("unit",)),
    "logical_not": ("bools",),
    "float_power": ("unit", 2.0),
    "dropout": ("unit", 0.0, True),
    "threshold": ("unit", 0.4, 20.0),
    "ldexp": ("unit", "integers"),
    "addcdiv": ("unit", "unit", "large"),
    "addcmul": ("unit", "unit", "unit"),
    "lerp": ("unit", "unit", "unit"),
    "masked_fill": ("unit", "bools", 2.0),
    "where": ("bools", "unit", "unit"),
    "Tensor.where": ("unit", "bools", "unit"),
    "__rpow__": ("unit", 2.0),
    "copy_": ("unit", "unit"),
    "fill_": ("unit", 0.5),
    "zero_": ("unit",),
}
INTEGERS = "bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor gcd lcm"
INTEGER_OPERATORS = "and iand ilshift ior irshift ixor lshift or rand rlshift ror rrshift rshift rxor xor"
for name in INTEGERS.split():
    SPECIAL[name] = ("integers", "integers")
for name in INTEGER_OPERATORS.split():
    SPECIAL[f"__{name}__"] = ("integers", "integers")


def recipe_of(key: str) -> tuple[Any, ...]:
    """Arguments for one of `FUNCTIONS`."""
    name = key.split(".")[1]
    for known in (key, name, name.removesuffix("_") if not name.endswith("__") else name):
        for table in (SPECIAL, DEFAULT):
            if known in table:
                return table[known]
    raise KeyError(f"{key} has no test")


def is_random(key: str) -> bool:
    return key.split(".")[1] in pointwise.RANDOM.split()


def is_in_place(key: str) -> bool:
    name = key.split(".")[1]
    if name.startswith("__"):
        return name.strip("_") in pointwise.OPERATORS_IN_PLACE.split()
    return name.endswith("_")


KEYS = [key for key in FUNCTIONS if getattr(dispatch._own.get(FUNCTIONS[key]), "__module__", "") == pointwise.__name__]


def make(kind: Any, generator: torch.Generator) -> Any:
    """A plain operand."""
    numbers = torch.rand(SIZE, generator=generator, dtype=torch.float64)
    made = {"unit": numbers * 0.8 + 0.1, "large": numbers * 5 + 1.5, "bools": numbers > 0.5}
    made["integers"] = (numbers * 5).long() + 1
    return made[kind] if isinstance(kind, str) else kind


def gradient_flag(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def spread(world: World, values: list[Any], turn: int) -> list[Any]:
    """Operands of a sharded call: the first is sharded, the others in turn sharded alike, sharded otherwise, or plain."""
    specs = world.specs(*SIZE)
    found = []
    for number, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            found.append(value)
        elif number and (turn + number) % 3 == 0:
            found.append(value.clone().requires_grad_(gradient_flag(value)))
        else:
            spec = specs[(turn + (turn + number) % 3 * number) % len(specs)]
            found.append(world.place(value, spec, requires_grad=gradient_flag(value)))
    return found


def call(function: Callable[..., Any], values: list[Any], in_place: bool) -> Any:
    if not in_place:
        return function(*values)
    changed = values[0].clone()
    found = function(changed, *values[1:])
    assert found is changed
    return found


def check_function(world: World, key: str, turn: int) -> None:
    function, generator = FUNCTIONS[key], torch.Generator().manual_seed(turn)
    plain = [make(kind, generator) for kind in recipe_of(key)]
    sharded = spread(world, plain, turn)
    plain = [item.requires_grad_() if gradient_flag(item) else item for item in plain]
    try:
        expected = call(function, plain, is_in_place(key))
    except RuntimeError as error:
        if "don't support automatic differentiation" in str(error):  # torch 2.8 says so of ldexp_
            return
        raise
    found = call(function, sharded, is_in_place(key))
    assert isinstance(found, ShardedTensor)
    assert (found.dtype, found.size(), found.requires_grad) == (expected.dtype, expected.size(), expected.requires_grad)
    full = found.full_tensor()
    assert_close(full, expected, rtol=1e-12, atol=1e-12)
    if not expected.requires_grad:
        return
    weights = torch.rand(SIZE, generator=generator, dtype=torch.float64).to(expected.dtype)
    try:
        scalar(expected * weights).backward()
    except RuntimeError as error:
        if "derivative for" in str(error):  # there is none
            return
        raise
    world.backward(scalar(full * weights))
    for ours, theirs in zip(sharded, plain, strict=True):
        if gradient_flag(theirs) and theirs.grad is not None:
            world.assert_gradient(ours, theirs.grad)


def scalar(values: torch.Tensor) -> torch.Tensor:
    total = values.sum()
    return total.real if total.is_complex() else total


def check_functions(world: World, keys: list[str]) -> int:
    for turn, key in enumerate(keys):
        try:
            with world.fresh_gradients():
                check_function(world, key, turn)
        except Exception as error:
            raise AssertionError(f"{key} (turn {turn}): {error!r}") from error
    return len(keys)


BACKENDS = pytest.mark.parametrize("backend", ["group", "workers"])


@BACKENDS
@pytest.mark.parametrize("num_places", [2, 3, 4])
def test_every_function_of_the_table(worlds: Worlds, backend: str, num_places: int) -> None:
    keys = [key for key in KEYS if not is_random(key)]
    assert set(worlds.check(backend, num_places, check_functions, keys[num_places - 2 :: 3])) != {0}
