"""The command line: ``marid run script.py``, ``marid rwkv MODEL``, ``marid cache info``."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import marid
from marid import environment
from marid.execute.compiled.disk import DiskCache, folder
from marid.report.units import bytes_text
from marid.settings import settings

if TYPE_CHECKING:
    from marid import runner  # needs the C++ half, and `marid env` works without


@click.group()
@click.version_option(marid.__version__, prog_name="marid")
def commands() -> None:
    """Run plain PyTorch lazily, as whole programs, on the device remote_accelerator."""


def _without_an_engine_on_cuda(_context: click.Context, _option: click.Parameter, as_cuda: bool) -> bool:
    if as_cuda and settings.engine != "cpu":
        raise click.UsageError(
            f"--as-cuda replaces torch.cuda, which MARID_ENGINE={settings.engine} needs: leave the variable out and "
            f'let a worker have the device, with marid.connect(workers=1, device="{settings.engine}") in the script'
        )
    return as_cuda


_as_cuda = click.option(
    "--as-cuda",
    is_flag=True,
    callback=_without_an_engine_on_cuda,
    help='Map every use of "cuda" to the device; the default device stays the CPU.',
)


@commands.command(context_settings={"allow_interspersed_args": False})
@_as_cuda
@click.option("--no-summary", is_flag=True, help="Print no summary at the end.")
@click.option(
    "--explain", is_flag=True, help="Print marid.explain() at the end instead: waits, recompiles and bytes by line."
)
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", metavar="[ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
def run(as_cuda: bool, no_summary: bool, explain: bool, script: str, arguments: tuple[str, ...]) -> runner.Job:
    """Run a Python script as `python` would, with the device as PyTorch's default device.

    Everything after SCRIPT belongs to the script.
    """
    from marid import runner

    return runner.Job(script, arguments, as_cuda=as_cuda, summary=not no_summary, explain=explain)


@commands.command(context_settings={"allow_interspersed_args": False})
@click.option("-o", "--output", default="report.html", show_default=True, metavar="FILE", help="Where to write it.")
@_as_cuda
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", metavar="[ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
def report(output: str, as_cuda: bool, script: str, arguments: tuple[str, ...]) -> runner.Job:
    """Run a Python script as `marid run`, and write what it did as one HTML file: time, FLOPs and memory by module, its
    programs as graphs, and each wait, recompile and fallback by line.

    Everything after SCRIPT belongs to the script.
    """
    from marid import runner

    path = str(Path(output).resolve())  # also when the script goes elsewhere
    return runner.Job(script, arguments, as_cuda=as_cuda, summary=False, report=path)


class _Finite(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return found


@commands.command()
@click.option("--prompt", help="Go on from this text; without it, chat.")
@click.option("--worker", metavar="ADDRESS", help="Compute there: tcp://host:7070. Weights and state stay there.")
@click.option("--key", type=click.Path(dir_okay=False, path_type=Path), help="The client's key file.")
@click.option("--temperature", type=_Finite(min=0), default=1.0, show_default=True, help="0: no chance.")
@click.option("--top-p", type=_Finite(0, 1, min_open=True), default=0.7, show_default=True)
@click.option("--tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Say so many at most.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Of weights that are not packed.")
@click.option("--seed", type=int, help="Draw the same tokens each time.")
@click.argument("model", metavar="MODEL", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def rwkv(
    model: Path,
    prompt: str | None,
    worker: str | None,
    key: Path | None,
    temperature: float,
    top_p: float,
    tokens: int,
    dtype: str | None,
    seed: int | None,
) -> int:
    """Let an RWKV-7 (.pth, .safetensors or .gguf) speak. Needs the extra `rwkv`.

    Text goes to standard output as it comes, everything else to standard error.
    """
    from marid.models.rwkv7_command import talk

    return talk(model, prompt, worker, key, temperature, top_p, tokens, dtype, seed)


@commands.group()
def cache() -> None:
    """What was compiled and is kept on disk."""


def _compiled() -> DiskCache:
    return DiskCache(folder(), marid.settings.cache_bytes)


@cache.command()
def info() -> None:
    """Say where compiled parts are, how many, and how large."""
    found = _compiled().entries()
    total = bytes_text(sum(nbytes for _, nbytes, _ in found))
    click.echo(f"{folder()}: {len(found)} compiled parts, {total} of {bytes_text(marid.settings.cache_bytes)}")


@cache.command()
def clear() -> None:
    """Remove all compiled parts."""
    click.echo(f"{_compiled().clear()} compiled parts removed")


@commands.command()
@click.option("--json", "as_json", is_flag=True, help="As one JSON object; bytes are numbers.")
def env(as_json: bool) -> None:
    """Say what a report of a bug needs: versions, processor, compiler, the C++ half, caches, variables, devices.

    Of the variables MARID_*, only settings are shown with their values. Works also where the C++ half cannot be built.
    """
    found = environment.describe(marid.__version__, marid._problem)
    click.echo(json.dumps(found, indent=2) if as_json else environment.text_of(found))


class _Bytes(click.ParamType):
    name = "BYTES"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from marid.remote.launch.command import parse_bytes

        if isinstance(value, int):
            return value
        try:
            return parse_bytes(str(value))
        except ValueError:
            self.fail(f"{value!r} is no number of bytes: 8g, 512m", param, ctx)


@commands.group(invoke_without_command=True)
@click.option("--bind", default="127.0.0.1:7070", show_default=True, metavar="HOST:PORT", help="Where to listen.")
@click.option("--device", default="cpu", show_default=True, help="cpu, or cuda:N.")
@click.option(
    "--keys", type=click.Path(file_okay=False, path_type=Path), help="Let in only clients with a key of this directory."
)
@click.option("--import", "imports", metavar="MODULE", multiple=True, help="Import it, and admit its operators.")
@click.option(
    "--memory-limit", type=_Bytes(), default=0, help="Bytes that the clients with one key may hold together: 8g."
)
@click.option(
    "--spill", type=_Bytes(), default=0, help="Bytes of that which may wait on the host when it is full: 32g."
)
@click.option("--chunk-memory", type=_Bytes(), default=4 << 30, help="Bytes of uploads kept to be recognised: 4g.")
@click.option(
    "--lease",
    type=_Finite(0, min_open=True),
    default=300.0,
    show_default=True,
    help="Seconds before a client is forgotten.",
)
@click.option("--owners", type=click.IntRange(1), default=16, show_default=True, help="Keys that are served at a time.")
@click.option("--until-eof", is_flag=True, help="End when standard input does.")
@click.pass_context
def worker(
    context: click.Context,
    bind: str,
    device: str,
    keys: Path | None,
    imports: tuple[str, ...],
    memory_limit: int,
    spill: int,
    chunk_memory: int,
    lease: float,
    owners: int,
    until_eof: bool,
) -> int | None:
    """Run programs for clients on this machine's device. Needs the extra `remote`.

    Clients connect with marid.connect("tcp://HOST:PORT"). An address that other machines reach needs --keys.
    """
    if context.invoked_subcommand is None:
        from marid.remote.launch.command import serve
        from marid.remote.worker.server import Limits

        limits = Limits(memory=memory_limit, spill=spill, chunks=chunk_memory, lease=lease)
        return serve(bind, device, keys, imports, limits, owners, until_eof)
    return None


@worker.command()
@click.option("--keys", type=click.Path(file_okay=False, path_type=Path), help="The worker's directory of keys.")
@click.argument("client", metavar="CLIENT")
def keygen(keys: Path | None, client: str) -> None:
    """Make a key for CLIENT, and one for the worker if it has none.

    Start the worker with --keys, give the client's file to the client, and connect with key=<the file>.
    """
    from marid.remote.launch.command import KEYS
    from marid.remote.launch.command import keygen as make

    directory = keys or KEYS
    _, file = make(directory, client)
    click.echo(f"for the worker:  marid worker --keys {directory} --bind 0.0.0.0:7070")
    click.echo(f'for the client:  marid.connect("tcp://HOST:7070", key="{file}")')


@commands.command()
@click.option("--key", type=click.Path(dir_okay=False, path_type=Path), help="The client's key file.")
@click.argument("address", metavar="ADDRESS")
def doctor(address: str, key: Path | None) -> int:
    """Find out what is wrong with the connection to the worker at ADDRESS, for example tcp://host:7070.

    The exit status is 1 when something is.
    """
    from marid.remote.launch.doctor import examine

    return 0 if examine(address, key, click.echo) else 1


def main() -> None:
    """The command ``marid``."""
    try:
        result = commands(prog_name="marid", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit("Aborted!")
    # A script runs outside of click, which would handle Ctrl-C and SystemExit in its own way.
    if result is None or isinstance(result, int):
        sys.exit(result)
    result.run()
