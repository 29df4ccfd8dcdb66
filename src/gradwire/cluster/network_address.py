"""Addresses of this machine: by network interface, or by the route to another machine."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from gradwire.errors import ConfigurationError

_SIOCGIFADDR = 0x8915
_MAX_INTERFACE_BYTES = 15
_ANY_PORT = 9  # nothing is sent

ELSEWHERE = "192.0.2.1"
"""An address that is reserved for documentation: the route to it is the route to other networks."""


def address_of_interface(name: str) -> str:
    """Return the address of a network interface (``eth0``, ``ib0``), the IPv4 one if it has both.

    Raises:
        ConfigurationError: The interface does not exist or has no address.
    """
    raw = name.encode()
    if len(raw) <= _MAX_INTERFACE_BYTES and b"\0" not in raw:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
            answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", raw))
            return socket.inet_ntoa(answer[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, interface = line.split()
            if interface == name and scope in ("00", "10"):  # global or this host; link-local ones need a zone
                return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    known = ", ".join(interface for _, interface in socket.if_nameindex())
    raise ConfigurationError(
        f"network interface {name!r} has no address on {socket.gethostname()}, which has: {known}; choose one of "
        "these, or leave interface out"
    )


def address_towards(host: str) -> str:
    """Return this machine's address on the route to another one, which can reach it there.

    Raises:
        ConfigurationError: There is no route to it.
    """
    try:
        family, kind, protocol, _, to = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(to)
            return str(sock.getsockname()[0])
    except OSError as error:
        target = "other machines" if host == ELSEWHERE else f"the driver at {host}"
        raise ConfigurationError(
            f"{socket.gethostname()} has no route to {target}: {error}; pass interface= with a network interface that all "
            "machines have"
        ) from error
