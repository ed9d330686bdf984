"""Which connections of a listening socket are known to be open."""

from __future__ import annotations

from marid.remote.wire.connection_limits import Doors


def test_a_message_after_the_end_of_its_connection_does_not_open_it_again() -> None:
    """The last message of a client may be taken after the end of its connection was reported."""
    doors = Doors("tcp://127.0.0.1:1")
    doors.accepted(1000)
    doors.enter(b"route", 1000, b"ann")
    assert doors.knows(b"route")
    doors.closed(1000)
    doors.enter(b"route", 1000, b"ann")
    assert not doors.knows(b"route")


def test_a_descriptor_that_is_used_again_is_the_new_connection() -> None:
    doors = Doors("tcp://127.0.0.1:1")
    for route in (b"first", b"second"):
        doors.accepted(1000)
        doors.enter(route, 1000, b"ann")
    assert not doors.knows(b"first")
    assert doors.knows(b"second")
