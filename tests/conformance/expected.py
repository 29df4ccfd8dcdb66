"""The tests of PyTorch that do not pass on gradwire, each with the reason.

`LIMITS` are tests that hold torch to a limit which gradwire does not have; they cannot pass and should not. `OPEN` are
differences that are left. A test that is listed and passes makes `make conformance` fail, so that the list stays true.
"""

from __future__ import annotations

LIMITS: dict[str, str] = {}

OPEN: dict[str, str] = {}


def reason_of(case: str) -> str | None:
    """Why a test is expected to fail; None if it is not."""
    return LIMITS.get(case) or OPEN.get(case)
