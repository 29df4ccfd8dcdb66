"""Versions that two workers compare before they exchange calls."""

from __future__ import annotations

import platform
from typing import Annotated

import msgspec
from msgspec import Meta

from gradwire.types import Trust

GRADWIRE_VERSION = "0.1.0"  # the one place: pyproject.toml reads it from here

_Version = Annotated[str, Meta(max_length=64)]


class Versions(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Versions of Python, torch and gradwire on a worker."""

    python: _Version
    torch: _Version
    gradwire: _Version


def own_versions() -> Versions:
    import torch  # imported here because the command line needs only gradwire's version

    return Versions(platform.python_version(), str(torch.__version__), GRADWIRE_VERSION)


def find_conflict(worker: str, versions: Versions, other: str, other_versions: Versions, trust: Trust) -> str | None:
    """Return why two workers are incompatible and what to do about it, or None if they are compatible.

    gradwire must be the same version. With ``trust="code"``, Python and torch must have the same major and minor version,
    because functions and pickles may not load under another one.

    Args:
        worker: Name of one worker.
        versions: Its versions.
        other: Name of the other worker.
        other_versions: Its versions.
        trust: Trust level of both.
    """
    if versions.gradwire != other_versions.gradwire:
        return (
            f"worker {worker} runs gradwire {versions.gradwire}, but worker {other} runs gradwire "
            f"{other_versions.gradwire}; install the same version of gradwire everywhere"
        )
    if trust != "code":
        return None
    for name, field in (("Python", "python"), ("torch", "torch")):
        one, two = getattr(versions, field), getattr(other_versions, field)
        if _release(one) != _release(two):
            return (
                f'worker {worker} runs {name} {one}, but worker {other} runs {name} {two}; with trust="code" every worker '
                f'needs the same major.minor version of {name}: install one everywhere, or use trust="data"'
            )
    return None


def _release(version: str) -> list[str]:
    """Return the first two numbers of a version, as text: ``["2", "13"]`` for ``2.13.0+cpu``."""
    return version.partition("+")[0].split(".")[:2]
