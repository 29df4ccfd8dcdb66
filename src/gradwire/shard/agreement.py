"""All ranks go on, or none: what they found out alone is compared before anything is changed.

A rank that refuses while the others go on would leave them waiting in the next collective call. So everybody says either
what it is about to do, or why it cannot; if not all say the same, all raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gradwire.shard.engines import Engine

Said = dict[str, Any]
"""What a rank is about to do, by name."""

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (TypeError, ValueError, KeyError, AttributeError, RuntimeError, NotImplementedError)
}


def agree(engine: Engine, prepare: Callable[[], Said], own_matters: Sequence[str] = ()) -> list[Said]:
    """What everybody is about to do; raises for all if somebody cannot, or if they are not about to do the same.

    Args:
        engine: Knows who everybody is.
        prepare: Finds out what this process is about to do.
        own_matters: Names of what may be different.

    Raises:
        Exception: What `prepare` raised; what it raised elsewhere, with the same type if that is an ordinary one.
        ValueError: Not all are about to do the same.
    """
    said: Said = {}
    refusal: tuple[str, str] | None = None
    failure: Exception | None = None
    try:
        said = prepare()
    except Exception as error:  # whatever it is, the others must hear of it
        failure, refusal = error, (type(error).__name__, str(error.args[0] if error.args else error))
    everybody: list[tuple[tuple[str, str] | None, Said]] = engine.gather_objects((refusal, said))
    if failure is not None:
        raise failure
    for rank, (found, _) in enumerate(everybody):
        if found is not None:
            kind, text = found
            raise _KINDS.get(kind, RuntimeError)(f"rank {rank} cannot do it, so no rank did: {kind}: {text}")
    _compare([item for _, item in everybody], own_matters)
    return [item for _, item in everybody]


def _compare(everybody: Sequence[Said], own_matters: Sequence[str]) -> None:
    first = everybody[0]
    for rank, other in enumerate(everybody):
        for name in first:
            if name not in own_matters and other[name] != first[name]:
                raise ValueError(
                    f"the ranks are not about to do the same: {name}={first[name]} on rank 0 does not match with "
                    f"{name}={other[name]} on rank {rank}"
                )
