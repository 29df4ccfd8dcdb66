"""Where a module is to live: a worker and one of its devices, as PyTorch writes it."""

from __future__ import annotations

from typing import Any

import torch

from gradwire.errors import ConfigurationError
from gradwire.rpc.peer_table import To

_FORMS = '"<worker>", "<worker>/<device>", "rank:<rank>" or "rank:<rank>/<device>"'


def parse_placement(where: To) -> tuple[To, str]:
    """The worker, by name or rank, and the device there.

    Args:
        where: One of the four forms of text, or whatever names a worker in a call (the device is then ``cpu``).

    Raises:
        ConfigurationError: The text has none of the forms.
        RuntimeError: torch does not know the device.
    """
    if not isinstance(where, str):
        return where, "cpu"
    worker, slash, device = where.partition("/")
    if not worker or (slash and not device) or "/" in device:
        raise ConfigurationError(f"Could not parse remote_device: {where}. The valid format is {_FORMS}")
    if not slash and _is_device(worker):
        raise ConfigurationError(f"{where!r} names a device and no worker. The valid format is {_FORMS}")
    kind, _, number = worker.partition(":")
    to: To = int(number) if kind == "rank" and number.isdecimal() else worker
    return to, str(torch.device(device or "cpu"))


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def on_device(value: Any, device: torch.device) -> Any:
    """The value with all its tensors on a device; looks into tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)(on_device(item, device) for item in value)
    if type(value) is dict:
        return {key: on_device(item, device) for key, item in value.items()}
    return value
