"""The outermost public surface is what ``public_names.txt`` says: names and signatures of ``marid``, its settings, the
device module, and the command line. A change of it is a decision: ``python -m tests.test_public_names --write``."""

from __future__ import annotations

import difflib
import enum
import inspect
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import click
import torch

import marid
from marid import cli

FILE = Path(__file__).with_name("public_names.txt")


def signature(function: Any) -> str:
    """As it was written, without addresses: defaults that are objects show their type."""
    if not inspect.isfunction(function):  # it stands for a method of PyTorch that is written in C++
        return "(...)"
    found = inspect.signature(function)
    parameters = []
    for parameter in found.parameters.values():
        default = parameter.default
        plain = default is parameter.empty or isinstance(default, (int, float, str, type(None), tuple, enum.Enum))
        parameters.append(parameter if plain else parameter.replace(default=type(default)))
    return str(found.replace(parameters=parameters))


def described(name: str, item: Any) -> Iterator[str]:
    """A name of a module, and for a class those of its own that do not begin with an underscore."""
    if inspect.isclass(item):
        yield f"class {name}({', '.join(base.__name__ for base in item.__bases__)})"
        own = {key: value for kind in reversed(_own(item)) for key, value in vars(kind).items() if key[0] != "_"}
        if is_dataclass(item):
            own |= {field.name: field.type for field in fields(item)}
        for key, value in sorted(own.items()):
            plain = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            yield f"    {key}{signature(plain) if callable(plain) and inspect.isroutine(plain) else _kind(plain)}"
    elif callable(item):
        yield f"{name}{signature(item)}"
    else:
        yield f"{name}: {type(item).__name__}"


def _own(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if base.__module__.split(".")[0] == "marid"]


def _kind(value: Any) -> str:
    return f": {value}" if isinstance(value, str) else ""


def commands(name: str, command: click.Command) -> Iterator[str]:
    options = [
        parameter.opts[0] if isinstance(parameter, click.Option) else str(parameter.human_readable_name)
        for parameter in command.params
    ]
    yield " ".join([name, *options])
    for key, inner in sorted(getattr(command, "commands", {}).items()):
        yield from commands(f"{name} {key}", inner)


def surface() -> str:
    """All of it, as text."""
    device: Any = torch.remote_accelerator  # pyright: ignore[reportAttributeAccessIssue]
    lines = ["# marid"]
    for name in sorted(marid.__all__):
        if name not in ("errors", "settings"):
            lines += described(name, getattr(marid, name))
    lines += ["", "# marid.errors"]
    for name in sorted(marid.errors.__all__):
        lines += described(name, getattr(marid.errors, name))
    lines += ["", "# torch.remote_accelerator"]
    for name in sorted(name for name in dir(device) if name[0] != "_"):
        item = getattr(device, name)
        lines += [f"class {name}"] if inspect.isclass(item) else described(name, item)
    lines += ["", "# torch.ops.marid"]
    lines += [f"{schema.name}{str(schema)[len(schema.name) :]}" for schema in _schemas()]
    lines += ["", "# the command line", *commands("marid", cli.commands)]
    return "\n".join(lines) + "\n"


def _schemas() -> list[Any]:
    names = "linear_activation", "fast_linear", "dequantize", "quantized_linear"
    return [getattr(torch.ops.marid, name).default._schema for name in names]


def test_the_public_surface_is_as_it_is_written_down() -> None:
    expected = FILE.read_text().splitlines()
    changes = "\n".join(difflib.unified_diff(expected, surface().splitlines(), "written down", "found", lineterm=""))
    assert not changes, f"{changes}\n\nIf that is meant: python -m tests.test_public_names --write, and the changelog"


def test_every_public_name_is_documented() -> None:
    """In the table of the README, by itself or with the module that it is in."""
    readme = (FILE.parents[1] / "README.md").read_text()
    spoken_of_elsewhere = {"Settings", "Stats", "FunctionStats", "RemoteStats", "Explanation", "ComputationGraph"}
    missing = [name for name in marid.__all__ if name not in spoken_of_elsewhere and f"marid.{name}" not in readme]
    assert missing in ([], ["SemanticMetadata"])


if __name__ == "__main__":
    if "--write" in sys.argv:
        FILE.write_text(surface())
    else:
        print(surface(), end="")
