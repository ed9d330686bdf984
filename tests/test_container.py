"""``packaging/Containerfile``: what can be known of it without building an image."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from marid.cli import commands

ROOT = Path(__file__).parents[1]
FILE = (ROOT / "packaging" / "Containerfile").read_text().replace("\\\n", "")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ARGUMENTS = dict(re.findall(r"^ARG (\w+)=(\S+)$", FILE, re.MULTILINE))
DOCUMENTED = re.findall(r"^\$ docker (?:run|build) (.+)$", (ROOT / "docs" / "remote.md").read_text(), re.MULTILINE)


def _parses(arguments: list[str]) -> None:
    """As ``marid worker`` with these arguments, or one of its commands; runs nothing."""
    asked = CliRunner().invoke(commands, ["worker", *arguments, "--help"])
    assert asked.exit_code == 0, asked.output


def test_versions_are_those_of_the_project() -> None:
    (torch,) = [one for one in map(Requirement, PROJECT["dependencies"]) if one.name == "torch"]
    assert ARGUMENTS["TORCH"] in torch.specifier
    assert f"TORCH ?= {ARGUMENTS['TORCH']}\n" in (ROOT / "Makefile").read_text()
    assert f"{ARGUMENTS['PYTHON']}.0" in SpecifierSet(PROJECT["requires-python"])
    assert set(re.findall(r"\.\[(\w+)\]", FILE)) == {"remote"} <= set(PROJECT["optional-dependencies"])


def test_what_it_copies_is_there() -> None:
    copied = [name for line in re.findall(r"^COPY (.+)$", FILE, re.MULTILINE) for name in line.split()[:-1]]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
    assert not [name for name in ("README.md", "LICENSE", "setup.py", "pyproject.toml") if name not in copied]


@pytest.mark.parametrize(("variant", "device"), [("cpu", "cpu"), ("cuda", "cuda:0")])
def test_each_variant_is_a_worker_with_keys_of_a_user_without_rights(variant: str, device: str) -> None:
    assert 'ENTRYPOINT ["worker"]' in FILE
    assert re.search(rf"\b{variant}\) build=\S+ device={device} ;;", FILE)
    (entry,) = re.findall(r"exec marid worker (.+?)\\n", FILE)
    assert re.search(r"^USER [1-9]\d*$", FILE, re.MULTILINE)
    arguments = json.loads(re.findall(r"^CMD (.+)$", FILE, re.MULTILINE)[0])
    first = shlex.split(entry.replace("%s", device).replace('"$@"', ""))
    _parses([*first, *arguments])
    _parses([*first, "keygen", "laptop"])
    assert arguments[arguments.index("--keys") + 1] == "/keys"
    port = re.findall(r"^EXPOSE (\d+)$", FILE, re.MULTILINE)
    assert [arguments[arguments.index("--bind") + 1]] == [f"0.0.0.0:{port[0]}"]


def test_documented_commands_are_understood() -> None:
    run = [shlex.split(line) for line in DOCUMENTED if "marid-keys" in line and "--entrypoint" not in line]
    assert len(run) == 3
    for words in run:
        (image,) = [place for place, word in enumerate(words) if word.startswith("marid-worker")]
        _parses(words[image + 1 :])
    given = {name for line in DOCUMENTED for name in re.findall(r"--build-arg (\w+)=", line)}
    assert given <= set(ARGUMENTS)
