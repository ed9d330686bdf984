"""``marid rwkv``: a prompt, or a chat in the terminal."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path

import click
import torch

import marid
from marid.errors import LazyTensorError
from marid.models.rwkv7_files import load
from marid.models.rwkv7_text import Talk


def talk(
    path: Path,
    prompt: str | None,
    worker: str | None,
    key: Path | None,
    temperature: float,
    top_p: float,
    tokens: int,
    dtype: str | None,
    seed: int | None,
) -> int:
    """Do what the command says; the exit status."""
    if key is not None and worker is None:
        raise click.UsageError("--key is for a worker: say which (--worker)")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # whatever the terminal can show
    try:
        if worker is not None:
            marid.connect(worker, key=key) if key is not None else marid.connect(worker)
        return _talk(path, prompt, temperature, top_p, tokens, dtype, seed)
    except (ValueError, ImportError, OSError, LazyTensorError) as error:
        raise click.ClickException(str(error)) from None


def _talk(
    path: Path, prompt: str | None, temperature: float, top_p: float, tokens: int, dtype: str | None, seed: int | None
) -> int:
    if seed is not None:
        torch.manual_seed(seed)
    begin = time.perf_counter()
    with click.progressbar(length=1000, label=f"loading {path.name}", file=sys.stderr) as bar:

        def seen(done: int, all_of_them: int) -> None:
            bar.update(done * 1000 // all_of_them - bar.pos)

        kind = None if dtype is None else getattr(torch, dtype)
        model = load(path, "remote_accelerator", kind, seen)
    conversation = Talk(model, temperature, top_p)
    of = model.config
    size = f"{of.layers} layers, width {of.width}, vocabulary {of.vocabulary}"
    click.echo(f"{size}; loaded in {time.perf_counter() - begin:.1f} s", err=True)
    if prompt is not None:
        prompt = prompt.encode(errors="surrogateescape").decode(errors="replace")  # bytes that are no text
        click.echo(prompt, nl=False)
        _stream(conversation, prompt, tokens, None)
    else:
        click.echo("Ctrl-D ends the conversation.", err=True)
        while (line := _line()) is not None:
            _stream(conversation, f"User: {line}\n\nAssistant:", tokens, "\n\n")
    if conversation.seconds:
        rate = conversation.tokens / conversation.seconds
        click.echo(f"{conversation.tokens} tokens, {rate:.1f} tokens/s", err=True)
    return 0


def _line() -> str | None:
    try:
        return click.prompt("User", prompt_suffix=": ")
    except (click.Abort, EOFError):
        click.echo(err=True)
        return None


def _stream(conversation: Talk, text: str, tokens: int, until: str | None) -> None:
    for piece in conversation.answer(text, tokens, until):
        click.echo(piece, nl=False)
        sys.stdout.flush()
    click.echo()
