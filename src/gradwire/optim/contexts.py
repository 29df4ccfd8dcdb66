"""The contexts whose gradients an optimizer uses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradwire.autograd import worker
from gradwire.errors import ConfigurationError

Contexts = int | Iterable[int]


def check_contexts(contexts: Any) -> tuple[int, ...]:
    """The ids of contexts that are alive here.

    Raises:
        ConfigurationError: These are no ids, or one is there twice.
        UnknownContext: One was released, or never existed here.
    """
    found = (contexts,) if isinstance(contexts, int) else tuple(contexts) if isinstance(contexts, Iterable) else ()
    for item in found or (None,):
        if not isinstance(item, int) or isinstance(item, bool):
            raise ConfigurationError(
                f"step needs the id of a context, or several; not {contexts!r}: opt.step(ctx) with `context() as ctx`"
            )
    if len(set(found)) != len(found):
        raise ConfigurationError(f"a context is there twice: {found}; its gradients would be counted twice")
    retrieve = worker.here().container.retrieve
    return tuple([retrieve(item).context_id for item in found])


def is_over(context_id: int) -> bool:
    """Whether a context was released."""
    return worker.here().container.find(context_id) is None
