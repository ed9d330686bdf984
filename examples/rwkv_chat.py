"""An RWKV-7 that goes on from a prompt, on the lazy device: ``python examples/rwkv_chat.py model.gguf "Once upon"``.

With a third argument, the address of a worker (``tcp://host:7070``), weights and state are there.
"""

from __future__ import annotations

import sys

import marid
from marid.models.rwkv7_files import load
from marid.models.rwkv7_text import Talk


def main() -> None:
    path, prompt, *worker = sys.argv[1:]
    if worker:
        marid.connect(worker[0])
    talk = Talk(load(path, "remote_accelerator"), temperature=1.0, top_p=0.7)
    print(prompt, end="", flush=True)
    for piece in talk.answer(prompt, most=100):
        print(piece, end="", flush=True)
    print(f"\n{talk.tokens / max(talk.seconds, 1e-9):.1f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    main()
