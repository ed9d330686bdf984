"""A TCP relay in a process of its own: counts the bytes of both directions, and can hold them back as networks do."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Relay", "relay_to"]


class Relay:
    """``address`` leads to the worker; ``up`` and ``down`` are the bytes that have passed. ``delay`` may be set to
    seconds that each direction takes."""

    def __init__(self, address: str, up: Any, down: Any, delay: Any) -> None:
        self.address = address
        self._up, self._down, self._delay = up, down, delay

    @property
    def counts(self) -> tuple[int, int]:
        """Bytes to the worker, and back."""
        return self._up.value, self._down.value

    def hold(self, seconds: float) -> None:
        """From now on, each direction takes so long."""
        self._delay.value = seconds


@contextmanager
def relay_to(address: str) -> Iterator[Relay]:
    """A relay to ``tcp://host:port``, ended afterwards."""
    context = multiprocessing.get_context("spawn")
    up, down, delay = context.Value("q", 0), context.Value("q", 0), context.Value("d", 0.0)
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(address, theirs, up, down, delay), daemon=True)
    process.start()
    try:
        yield Relay(f"tcp://127.0.0.1:{ours.recv()}", up, down, delay)
    finally:
        process.terminate()
        process.join()


def _serve(address: str, pipe: Any, up: Any, down: Any, delay: Any) -> None:
    host, _, port = address.removeprefix("tcp://").rpartition(":")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(_pass(reader, there_writer, up, delay), _pass(there_reader, writer, down, delay))

    async def main() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=1 << 20)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: Any, delay: Any) -> None:
    """Every piece leaves ``delay`` after it came, in order; pieces behind it need not wait for it."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while data := await reader.read(1 << 20):
        count.value += len(data)
        due = max(due, loop.time() + delay.value)
        if delay.value:
            loop.call_at(due, writer.write, data)
        else:
            writer.write(data)
            await writer.drain()
    await asyncio.sleep(delay.value)
    writer.close()
