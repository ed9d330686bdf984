"""``marid rwkv``, the example, and what they are made of: a model that speaks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from marid.cli import commands
from marid.models.rwkv7 import RWKV7, Config
from marid.models.rwkv7_files import load
from marid.models.rwkv7_text import Talk, _begun, tokenizer
from marid.remote.launch.local import start_workers
from tests.helpers import DEVICE
from tests.test_rwkv7 import blinkdl, random_model

pytest.importorskip("rwkv")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of the world vocabulary."""
    made = tmp_path_factory.mktemp("rwkv") / "model.pth"
    config = Config(layers=2, width=64, vocabulary=65536, hidden=128, ranks=(8, 8, 8, 8))
    torch.save(blinkdl(random_model(config)), made)
    return made


def greedy(model: RWKV7, text: str, most: int) -> str:
    """What the model says on the CPU, written out."""
    words, found = tokenizer(), b""
    with torch.inference_mode():
        logits, state = model.prefill(torch.tensor([words.encode(text)]))
        for _ in range(most):
            token = logits.argmax(-1)
            if not token.item():
                break
            found += words.idx2token.get(int(token), b"")
            logits, state = model(token[:, None], state)
            logits = logits[:, -1]
    return found.decode("utf-8", "replace").removesuffix("\ufffd")


def test_it_says_what_the_model_says(path: Path) -> None:
    """Also when it is asked again: what it has said and heard counts."""
    talk = Talk(load(path, DEVICE), temperature=0)
    first = "".join(talk.answer("Hello", 12))
    model = load(path)
    assert first == greedy(model, "Hello", 12)
    assert talk.tokens == 11
    assert talk.seconds > 0
    assert "".join(talk.answer(" and", 5))
    assert not list(talk.answer("x", 0))


def test_it_draws_by_temperature_and_top_p(path: Path) -> None:
    """The same seed gives the same text; a small ``top_p`` is the likeliest token."""

    def said(seed: int, top_p: float) -> str:
        torch.manual_seed(seed)
        return "".join(Talk(load(path, DEVICE), 1.0, top_p).answer("Hello", 8))

    assert said(1, 0.9) == said(1, 0.9)
    assert said(1, 0.9) != said(2, 0.9)
    assert said(3, 1e-9) == greedy(load(path), "Hello", 8)


def test_it_stops_where_it_is_told(path: Path) -> None:
    text = greedy(load(path), "Hello", 12)
    end = text[6:8]
    found = "".join(Talk(load(path, DEVICE), temperature=0).answer("Hello", 12, until=end))
    assert found == text[: text.index(end)]
    assert [_begun(text, "\n\n") for text in ("a", "a\n", "a\n\n", "")] == [0, 1, 2, 0]


def test_the_command(path: Path) -> None:
    """Text on standard output, all else on standard error; a chat ends with its input."""
    expected = greedy(load(path), "Hello", 6)
    common = ["rwkv", str(path), "--temperature", "0", "--tokens", "6"]
    result = CliRunner().invoke(commands, [*common, "--prompt", "Hello"], standalone_mode=False)
    assert result.exception is None
    assert result.stdout == f"Hello{expected}\n"
    assert "5 tokens, " in result.stderr
    assert "2 layers, width 64, vocabulary 65536" in result.stderr
    result = CliRunner().invoke(commands, common, input="Hi\nMore\n", standalone_mode=False)
    assert result.exception is None
    assert result.stdout.count("User: ") == 3
    bad = path.with_name("bad.gguf")
    bad.write_bytes(b"x")
    result = CliRunner().invoke(commands, ["rwkv", str(bad), "--prompt", "x"])
    assert result.exit_code == 1
    assert "no GGUF file" in result.stderr


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--worker", "garbage"], "'garbage' is no address"),
        (["--key", "client.key"], "--key is for a worker"),
        (["--temperature", "nan"], "'nan' is no finite number"),
    ],
    ids=["address", "key", "temperature"],
)
def test_wrong_use_of_the_command(path: Path, options: list[str], error: str) -> None:
    result = CliRunner().invoke(commands, ["rwkv", str(path), "--prompt", "Hello", *options])
    assert result.exit_code != 0
    assert error in result.output


def test_a_model_of_other_tokens() -> None:
    with pytest.raises(ValueError, match="the model knows 100 tokens"):
        Talk(random_model(Config(layers=2, width=64, vocabulary=100, hidden=128, ranks=(8, 8, 8, 8))))


def test_the_example_on_a_worker(path: Path) -> None:
    (worker,) = start_workers(1, transport="tcp")
    try:
        command = [sys.executable, str(ROOT / "examples" / "rwkv_chat.py"), str(path), "Hello", worker.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=dict(os.environ), check=False)
    finally:
        worker.stop()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Hello")
    assert "tokens/s" in done.stderr
