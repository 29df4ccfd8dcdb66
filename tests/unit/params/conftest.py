"""Workers of one process for the tests."""

from unit.autograd.conftest import trio

__all__ = ["trio"]
