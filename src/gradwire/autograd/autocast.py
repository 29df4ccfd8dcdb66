"""Autocast travels with calls: what is called runs under the caller's `torch.autocast`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import torch

from gradwire.errors import DecodeError
from gradwire.rpc.agent import Agent
from gradwire.rpc.interceptors import Envelope, Interceptor
from gradwire.wire.messages import prepare

NOTE: Final = "autocast"

_DEVICES: Final = ("cpu", "cuda", "xpu", "mps")
_DTYPES: Final = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
_is_any_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled


class Autocast(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Goes with every call made under autocast.

    Attributes:
        dtypes: Names of dtypes by the type of device, for those it is enabled for.
        caches: Whether weights are cast once and kept.
    """

    dtypes: dict[str, str]
    caches: bool


class AutocastInterceptor(Interceptor):
    """Attaches the caller's autocast to calls, and runs what is called under it."""

    name = NOTE
    note_type = Autocast

    def wants_calls(self) -> bool:
        """Calls made under autocast."""
        return _is_any_enabled()

    def outgoing(self, envelope: Envelope, tensors: Sequence[torch.Tensor]) -> Autocast | None:
        """The caller's autocast; replies have none."""
        if envelope.kind == "reply":
            return None
        dtypes = {
            device: str(torch.get_autocast_dtype(device)).removeprefix("torch.")
            for device in _DEVICES
            if torch.is_autocast_enabled(device)
        }
        return Autocast(dtypes, torch.is_autocast_cache_enabled())

    def around(self, envelope: Envelope, note: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, under the caller's autocast.

        Raises:
            DecodeError: It is for a device or a dtype that is not known here.
        """
        message: Autocast = note
        unknown = [item for item in message.dtypes.items() if item[0] not in _DEVICES or item[1] not in _DTYPES]
        if unknown:
            raise DecodeError(f"autocast is not known for {unknown}")

        def run(*args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for device, dtype in message.dtypes.items():
                    if device == "cpu" or torch.get_device_module(device).is_available():
                        stack.enter_context(torch.autocast(device, _DTYPES[dtype], cache_enabled=message.caches))
                return function(*args, **kwargs)

        return run


def attach(agent: Agent) -> None:
    """Lets autocast travel with the calls of a new worker."""
    agent.interceptors.append(AutocastInterceptor())


prepare(Autocast)
