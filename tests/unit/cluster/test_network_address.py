"""Addresses of this machine."""

from __future__ import annotations

import pytest

from gradwire.cluster.network_address import address_of_interface, address_towards
from gradwire.errors import ConfigurationError


def test_address_of_an_interface() -> None:
    assert address_of_interface("lo") == "127.0.0.1"


@pytest.mark.parametrize("name", ["nosuch0", "a" * 40, "", "lo\0"])
def test_interface_that_does_not_exist_is_named_with_those_that_do(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"has no address on .* which has: .*lo"):
        address_of_interface(name)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9"])
def test_address_on_the_way_to_this_machine_is_its_own(host: str) -> None:
    assert address_towards(host) == "127.0.0.1"


def test_machine_that_cannot_be_found() -> None:
    with pytest.raises(ConfigurationError, match=r"no route to the driver at nosuchhost\.invalid.*interface="):
        address_towards("nosuchhost.invalid")
