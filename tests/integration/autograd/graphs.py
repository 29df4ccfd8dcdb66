"""The graphs that go wrong elsewhere: what workers run, and the programs around it.

Every graph takes two inputs and returns a loss. It runs on workers and, as the oracle, in one process (`autograd.worlds`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autograd.worlds import call, here, submit, weight
from gradwire import rpc

Tensor = torch.Tensor
Graph = Callable[[Tensor, Tensor], Tensor]

FIRST, SECOND, THIRD = "worker0", "worker1", "worker2"


# -- what workers run ------------------------------------------------------------------------------------------------


def layer(x: Tensor, key: str = "layer") -> Tensor:
    """Uses a parameter of the worker."""
    return torch.tanh(x * weight(key))


def combine(one: Tensor, other: Tensor) -> Tensor:
    return layer(one, "one") + torch.sin(other) * weight("other")


def only_first(one: Tensor, other: Tensor) -> Tensor:
    """Does not use all it gets."""
    return layer(one)


def several(x: Tensor) -> dict[str, Tensor]:
    return {"left": layer(x, "left"), "right": layer(x, "right"), "both": layer(x, "left") * layer(x, "right")}


def echo(x: Any) -> Any:
    return x


def own_weight(key: str) -> Tensor:
    """A parameter itself."""
    return weight(key)


def change_in_place(x: Tensor) -> Tensor:
    """Changes what came, before and after it is used."""
    x.mul_(weight("scale"))
    y = x * 3
    x.add_(weight("shift")).sigmoid_()
    return x + y


def pass_on(way: list[str], x: Tensor) -> Tensor:
    """Every worker of the way does something before and after the next one does."""
    if not way:
        return layer(x)
    return layer(call(way[0], pass_on, way[1:], layer(x, "before")), "after")


def pass_untouched(way: list[str], x: Tensor) -> Tensor:
    """Only the last worker of the way looks at it."""
    return call(way[0], pass_untouched, way[1:], x) if way else layer(x)


def bounce(there: str, depth: int, x: Tensor) -> Tensor:
    """To the other worker and back, each call inside the one before."""
    return x if depth == 0 else layer(call(there, bounce, here(), depth - 1, layer(x)), "back")


def fan_out(x: Tensor) -> Tensor:
    """A diamond that begins here, and ends on another worker."""
    start = layer(x)
    sides = [submit(name, layer, start, "side") for name in (SECOND, THIRD)]
    return call(THIRD, combine, *[side.wait() for side in sides])


@rpc.functions.async_execution
def answer_later(to: str, x: Tensor) -> Any:
    """Answers with what a callback makes of another worker's answer."""
    return submit(to, layer, layer(x)).then(lambda done: layer(call(to, layer, done.wait()), "late"))


# -- some part is unused ----------------------------------------------------------------------------------------------


def unused_result(x: Tensor, y: Tensor) -> Tensor:
    call(FIRST, layer, x)
    return call(SECOND, layer, y).sum()


def unused_argument(x: Tensor, y: Tensor) -> Tensor:
    return (call(FIRST, only_first, x, call(SECOND, layer, y)) * weight("w")).sum()


def used_under_no_grad(x: Tensor, y: Tensor) -> Tensor:
    hidden = call(FIRST, layer, x)
    with torch.no_grad():
        factor = hidden.sum()
    return (call(SECOND, layer, y) * factor).sum()


def one_of_two_calls(x: Tensor, y: Tensor) -> Tensor:
    call(FIRST, layer, x * y)
    return call(FIRST, layer, x).sum()


def one_of_two_calls_first(x: Tensor, y: Tensor) -> Tensor:
    used = call(FIRST, layer, x)
    call(FIRST, layer, x * y)
    return used.sum()


def one_of_several_outputs(x: Tensor, y: Tensor) -> Tensor:
    return call(FIRST, several, x * y)["right"].sum()


def unused_inside(x: Tensor, y: Tensor) -> Tensor:
    """A worker that no gradient reaches, which waits for one that it called."""
    call(FIRST, pass_on, [SECOND, THIRD, FIRST], x)
    return call(SECOND, layer, y).sum()


def unused_weight(x: Tensor, y: Tensor) -> Tensor:
    call(FIRST, own_weight, "unused")
    return (x * call(SECOND, own_weight, "used")).sum()


def nothing_remote_is_used(x: Tensor, y: Tensor) -> Tensor:
    call(FIRST, pass_on, [SECOND], x)
    return (x * y).sum()


def detached_argument(x: Tensor, y: Tensor) -> Tensor:
    return call(FIRST, combine, call(SECOND, layer, x).detach(), call(THIRD, layer, y)).sum()


def unused_beside_skip(x: Tensor, y: Tensor) -> Tensor:
    """A gate must not wait for what never comes."""
    hidden = x * weight("w")
    call(FIRST, layer, hidden)
    hidden = hidden + call(SECOND, layer, hidden)
    call(SECOND, layer, hidden)
    return (hidden * y).sum()


UNUSED: list[Graph] = [
    unused_result,
    unused_argument,
    used_under_no_grad,
    one_of_two_calls,
    one_of_two_calls_first,
    one_of_several_outputs,
    unused_inside,
    unused_weight,
    nothing_remote_is_used,
    detached_argument,
    unused_beside_skip,
]


# -- everything is used -----------------------------------------------------------------------------------------------


def all_outputs(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack(list(call(FIRST, several, x * y).values())).sum()


def diamond(x: Tensor, y: Tensor) -> Tensor:
    start = call(FIRST, layer, x)
    return call(THIRD, combine, call(SECOND, layer, start), start * y).sum()


def nested_diamond(x: Tensor, y: Tensor) -> Tensor:
    return (call(FIRST, fan_out, x) * y).sum()


def ping_pong(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(50):
        x = torch.sin(call(FIRST, layer, x) + y)
    return x.sum()


def nested_ping_pong(x: Tensor, y: Tensor) -> Tensor:
    return (call(FIRST, bounce, SECOND, 50, x) * y).sum()


def skip(x: Tensor, y: Tensor) -> Tensor:
    hidden = x * y
    return (hidden + call(FIRST, layer, hidden)).sum()


def shared_weight(x: Tensor, y: Tensor) -> Tensor:
    return (call(FIRST, layer, x * weight("shared")) * weight("shared") * y).sum()


def hooked_weight(x: Tensor, y: Tensor) -> Tensor:
    """The hook of a weight that is used before and after must see the sum."""
    hidden = call(FIRST, layer, x * weight("hooked"), "hooked")
    return (call(FIRST, layer, hidden * weight("hooked"), "hooked") * y).sum()


def chain(num_blocks: int, x: Tensor, y: Tensor) -> Tensor:
    """Skip connections and a shared weight, block after block."""
    for number in range(num_blocks):
        x = x + 0.3 * call((FIRST, SECOND)[number % 2], layer, x * weight("shared")) * weight("shared")
    return (x * y).sum()


def chain_of_30(x: Tensor, y: Tensor) -> Tensor:
    return chain(30, x, y)


def nested(x: Tensor, y: Tensor) -> Tensor:
    return (call(FIRST, pass_on, [SECOND, THIRD, FIRST], x) * y).sum()


def forwarded_untouched(x: Tensor, y: Tensor) -> Tensor:
    return (call(FIRST, pass_untouched, [SECOND, THIRD], x) + call(FIRST, echo, y) * x).sum()


def three_ways(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return layer(x), layer(x, "second"), x * 3


def product_of(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return layer(a * b + c, "product")


def handed_on(x: Tensor, y: Tensor) -> Tensor:
    """What came goes on to another worker untouched: some of it twice, some not at all, some beside a leaf."""
    one, two, _ = call(FIRST, three_ways, x)
    result = call(SECOND, product_of, one, two, one)
    return call(THIRD, product_of, y, result, y).sum()


def handed_on_watched(x: Tensor, y: Tensor) -> Tensor:
    """As before, but hooks change the gradients on their way, and one is kept."""
    one, two, _ = call(FIRST, three_ways, x)
    one.register_hook(lambda gradient: gradient * 3)  # type: ignore[no-untyped-call]
    two.retain_grad()
    result = call(SECOND, product_of, one, two, one)
    return call(THIRD, product_of, y, result, y).sum()


def changed_in_place(x: Tensor, y: Tensor) -> Tensor:
    result = call(FIRST, change_in_place, x * 2)
    result.mul_(y)
    return call(SECOND, change_in_place, result.add_(x)).sum()


def large_in_place(x: Tensor, y: Tensor) -> Tensor:
    """Tensors that arrive in shared memory, and are changed there."""
    wide = x.repeat(20_000, 1) * weight("wide", 3)
    result = call(FIRST, change_in_place, wide)
    return (result.mul_(2).tanh_() * y).mean()


def to_oneself(x: Tensor, y: Tensor) -> Tensor:
    hidden = call("driver", layer, x) + call("driver", layer, y)
    return (call("driver", pass_on, [FIRST, "driver", FIRST], hidden) + hidden).sum()


def asynchronous(x: Tensor, y: Tensor) -> Tensor:
    hidden = [submit(name, layer, x, f"w{number}") for number in range(3) for name in (FIRST, SECOND, THIRD)]
    return (torch.stack([item.wait() for item in hidden]).sum(0) * y).sum()


def callbacks(x: Tensor, y: Tensor) -> Tensor:
    first = submit(FIRST, layer, x).then(lambda done: call(SECOND, layer, done.wait() * y))
    return (first.wait() * call(THIRD, answer_later, FIRST, y)).sum()


def same_tensor_twice(x: Tensor, y: Tensor) -> Tensor:
    hidden = x * y
    result = call(FIRST, combine, hidden, hidden)
    return (result * call(FIRST, echo, [hidden, hidden, result])[1]).sum()


def weight_travels(x: Tensor, y: Tensor) -> Tensor:
    """Parameters as result and as argument: only leaves behind those sends."""
    remote = call(FIRST, own_weight, "travelling")
    return (call(SECOND, combine, x * remote, weight("own")) + y * remote).sum()


def views(x: Tensor, y: Tensor) -> Tensor:
    """Parts of one tensor, as argument and of a result."""
    both = torch.stack([x, y]) * weight("both")
    one, other = call(FIRST, echo, both.t().contiguous().t())
    return (call(SECOND, combine, both[0], other) + call(THIRD, layer, one[None].expand(2, 3)).sum(0)).sum()


USED: list[Graph] = [
    all_outputs,
    diamond,
    nested_diamond,
    ping_pong,
    nested_ping_pong,
    skip,
    shared_weight,
    hooked_weight,
    chain_of_30,
    nested,
    forwarded_untouched,
    handed_on,
    handed_on_watched,
    changed_in_place,
    large_in_place,
    to_oneself,
    asynchronous,
    callbacks,
    same_tensor_twice,
    weight_travels,
    views,
]
