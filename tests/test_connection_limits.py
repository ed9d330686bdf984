"""Which connections of a listening socket are known to be open."""

from __future__ import annotations

from marid.remote.worker.connection_limits import ConnectionLimits


def test_a_message_after_the_end_of_its_connection_does_not_open_it_again() -> None:
    """The last message of a client may be taken after the end of its connection was reported."""
    limits = ConnectionLimits("tcp://127.0.0.1:1")
    limits.accepted(1000)
    limits.admit(b"route", 1000, b"ann")
    assert limits.is_admitted(b"route")
    limits.closed(1000)
    limits.admit(b"route", 1000, b"ann")
    assert not limits.is_admitted(b"route")


def test_a_descriptor_that_is_used_again_is_the_new_connection() -> None:
    limits = ConnectionLimits("tcp://127.0.0.1:1")
    for route in (b"first", b"second"):
        limits.accepted(1000)
        limits.admit(route, 1000, b"ann")
    assert not limits.is_admitted(b"first")
    assert limits.is_admitted(b"second")
