"""The tree that is drawn in `gradwire.errors` is the tree of its classes."""

from __future__ import annotations

import re

from gradwire import errors
from gradwire.errors import GradwireError

_LINE = re.compile(r"(?P<indent> *)(?P<name>[A-Z]\w+)(?: \((?P<more>[\w, ]+)\))?(?:  .*)?")


def drawn() -> dict[str, list[str]]:
    """The names of each class's bases, as the drawing has them: the parent first, then those in parentheses."""
    found: dict[str, list[str]] = {}
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines()[2:]:
        match = _LINE.fullmatch(line)
        if match is None:
            break
        depth = len(match["indent"]) // 2
        del parents[depth:]
        found[match["name"]] = [*parents[-1:], *re.findall(r"\w+", match["more"] or "")]
        parents.append(match["name"])
    return found


def test_the_drawn_tree_is_the_real_one() -> None:
    classes = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, GradwireError)]
    real = {kind.__name__: [base.__name__ for base in kind.__bases__] for kind in classes}
    assert drawn() == {**real, "GradwireError": []}
