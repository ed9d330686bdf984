"""Addresses of workers, as users write them and as ZeroMQ takes them."""

from __future__ import annotations

import ipaddress

from marid.errors import AuthenticationError

__all__ = ["endpoint", "host_of", "is_loopback", "served_endpoint"]


def endpoint(bind: str) -> tuple[str, bool]:
    """The ZeroMQ endpoint of ``HOST:PORT``, ``tcp://...`` or ``ipc://...``, and whether only this machine reaches it.

    Raises ``ValueError``.
    """
    if bind.startswith("ipc://"):
        return bind, True
    host, _, port = bind.removeprefix("tcp://").rpartition(":")
    if not host or not (port.isdigit() or port == "*"):
        raise ValueError(f"{bind!r} is no address: give HOST:PORT, for example 127.0.0.1:7070")
    shown = "127.0.0.1" if host == "localhost" else host
    return f"tcp://{shown}:{'*' if port == '0' else port}", is_loopback(host.strip("[]"))


def served_endpoint(bind: str, has_keys: bool) -> str:
    """The endpoint to listen at. Raises ``ValueError``, and ``AuthenticationError`` for a public one without keys."""
    address, loopback = endpoint(bind)
    if not has_keys and not loopback:
        raise AuthenticationError(
            f"{bind} can be reached from other machines, and whoever connects may run programs here: give keys "
            "(`marid worker keygen`, then --keys), or bind to 127.0.0.1"
        )
    return address


def host_of(address: str) -> str:
    """The host of an endpoint, by which others on its network reach it."""
    if address.startswith("ipc://"):
        return "127.0.0.1"
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine as nobody else reaches it. A name other than localhost may lead anywhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
