"""``marid.save_program`` and ``marid.load_program``: the file does what the function does, and nothing else."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marid
from marid.engine.safetensors import read_file, read_metadata, write_file
from marid.errors import LazyTensorError, MaterializationError, UnsupportedOperationError
from tests.helpers import DEVICE, assert_same
from tests.remote_helpers import connected

ENTRY, DIGEST = "marid.program", "marid.program.sha256"


def _to(thing: Any, device: str) -> Any:
    if isinstance(thing, (tuple, list)):
        return type(thing)(_to(item, device) for item in thing)
    if isinstance(thing, dict):
        return {key: _to(item, device) for key, item in thing.items()}
    return thing.to(device) if isinstance(thing, torch.Tensor) else thing


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.after(x))


class _Transformer(nn.Module):
    """Its head is its embedding."""

    def __init__(self, width: int = 16, words: int = 20) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(words, width), nn.Parameter(torch.randn(12, width))
        self.blocks = nn.Sequential(_Block(width), _Block(width))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(x) + self.positions[: x.shape[1]]))


def _mlp(device: str) -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    return model, _step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), F.mse_loss)


def _convolutions(device: str) -> Any:
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * 9, 10)),
    ).to(device)
    return model, _step(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), F.cross_entropy)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[..., torch.Tensor]) -> Any:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _batches(name: str, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = torch.Generator().manual_seed(7)
    if name == "mlp":
        return [(torch.randn(5, 8, generator=source), torch.randn(5, 4, generator=source)) for _ in range(count)]
    return [
        (torch.randn(4, 3, 8, 8, generator=source), torch.randint(10, (4,), generator=source)) for _ in range(count)
    ]


_TRAINERS = {"mlp": _mlp, "convolutions": _convolutions}


def _trained(name: str, path: Path) -> tuple[Any, list[torch.Tensor], Any]:
    """Save a step after one call; the model, and the losses and weights of eager PyTorch for the calls behind it."""
    made = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        made.append(_TRAINERS[name](device))
    (eager_model, eager), (model, step) = made
    batches = _batches(name, 5)
    for function, device in ((eager, "cpu"), (step, DEVICE)):
        torch.manual_seed(1)
        function(*_to(batches[0], device))
    marid.save_program(path, step, *_to(batches[1], DEVICE))
    torch.manual_seed(2)
    losses = [eager(*batch) for batch in batches[1:]]
    return (model, step), losses, eager_model.state_dict()


# --- values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(_TRAINERS))
def test_training_steps(name: str, tmp_path: Path) -> None:
    """Losses and weights of several calls, with AdamW's counters, momentum, statistics of norms and dropout."""
    _, losses, weights = _trained(name, tmp_path / "step")
    program = marid.load_program(tmp_path / "step")
    torch.manual_seed(2)
    assert_same([program(*_to(batch, DEVICE)) for batch in _batches(name, 5)[1:]], losses)
    assert_same({key: program.state[key] for key in weights}, weights)
    assert program.roles["0.weight"] == "parameter"


def test_saving_changes_nothing(tmp_path: Path) -> None:
    (model, step), losses, weights = _trained("convolutions", tmp_path / "trained")
    grads = [p.grad for p in model.parameters()]
    pending = model(_to(_batches("convolutions", 1)[0][0], DEVICE)).sum()
    before = {key: value.cpu() for key, value in model.state_dict().items()}
    position = torch.remote_accelerator.get_rng_state()  # pyright: ignore[reportAttributeAccessIssue]
    marid.save_program(tmp_path / "step", step, *_to(_batches("convolutions", 1)[0], DEVICE))
    assert_same(model.state_dict(), before)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.remote_accelerator.get_rng_state(), position)  # pyright: ignore[reportAttributeAccessIssue]
    pending.backward()  # which needs the weights, and statistics, that were
    for name, entry in read_file(tmp_path / "trained").items():
        if name in weights:
            model.state_dict()[name].copy_(entry.tensor)
    torch.manual_seed(2)
    assert_same([step(*_to(batch, DEVICE)) for batch in _batches("convolutions", 5)[1:]], losses)
    assert_same(model.state_dict(), weights)


def test_a_first_step_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It makes the optimizer's state. The file holds what this process holds afterwards."""
    torch.manual_seed(0)
    model, step = _mlp(DEVICE)
    batches = [_to(batch, DEVICE) for batch in _batches("mlp", 4)]
    marid.save_program(tmp_path / "step", step, *batches[0])
    assert "call 1 of" in caplog.text
    program = marid.load_program(tmp_path / "step")
    assert_same([program(*batch) for batch in batches], [step(*batch).cpu() for batch in batches])
    model.load_state_dict({key: program.state[key] for key in model.state_dict()})
    caplog.clear()
    plain = nn.Linear(8, 4).to(DEVICE)
    marid.save_program(tmp_path / "step", _step(plain, torch.optim.SGD(plain.parameters()), F.mse_loss), *batches[0])
    assert not caplog.text


@pytest.mark.parametrize("gradients", [False, True])
def test_a_transformer(gradients: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    eager = _Transformer().eval()
    torch.manual_seed(0)
    model = _Transformer().eval().to(DEVICE)
    x, y = torch.randint(20, (2, 2, 9))
    with torch.set_grad_enabled(gradients):
        marid.save_program(tmp_path / "model", model, x.to(DEVICE))
    program = marid.load_program(tmp_path / "model")
    assert_same([program(x.to(DEVICE)), program(y.to(DEVICE))], [eager(x).detach(), eager(y).detach()])
    assert program.state["head.weight"] is program.state["embed.weight"]
    assert_same({key: program.state[key] for key in eager.state_dict()}, eager.state_dict())


def test_as_fx(tmp_path: Path) -> None:
    """The same operators, which run on the CPU too."""
    torch.manual_seed(0)
    model = _Transformer().eval().to(DEVICE)
    x = torch.randint(20, (2, 9))
    marid.save_program(tmp_path / "model", lambda x: {"logits": model(x), "x": x}, x.to(DEVICE))
    program = marid.load_program(tmp_path / "model")
    module = program.to_fx()
    state = {name.replace(".", "_"): tensor.cpu() for name, tensor in program.state.items()}
    inputs = [node.target for node in module.graph.nodes if node.op == "placeholder"]
    result = module(*[x if name == "argument_0" else state[str(name).removeprefix("_")] for name in inputs])
    assert_same(result, {"logits": program(x)["logits"].cpu(), "x": x})
    call = next(node for node in module.graph.nodes if node.op == "call_function")
    assert "test_save_program.py" in call.meta["stack_trace"]
    _small(tmp_path / "step")
    code = marid.load_program(tmp_path / "step").to_fx().code
    assert "number_" in code
    assert "bernoulli_.float" in code


def test_structures_of_arguments_and_results(tmp_path: Path) -> None:
    def function(batch: dict[str, Any], scale: float, options: list[Any]) -> Any:
        x = batch["x"] * scale + options[0]
        return {"sum": (x.sum(), None), "inputs": [batch["mask"], 2.5, "text"], "view": x[0], "x": x}

    def given(device: str) -> tuple[Any, ...]:
        mask = torch.tensor([True, False], device=device)
        x = torch.arange(6.0, device=device).view(3, 2)
        return {"x": x, "mask": mask}, -0.0, [torch.ones(2, device=device), "mean", None, 1 + 2j]

    marid.save_program(tmp_path / "f", function, *given(DEVICE))
    program = marid.load_program(tmp_path / "f")
    arguments = given(DEVICE)
    result = program(*arguments)
    assert_same(result, function(*given("cpu")))
    assert result["inputs"][0] is arguments[0]["mask"]
    result["x"].zero_()
    assert not result["view"].any()  # one memory
    assert_same(program(*given("cpu")), function(*given("cpu")))  # uploaded
    x = given(DEVICE)[0]["x"]
    other = {"x": torch.stack([x, x], -1)[..., 0], "mask": torch.zeros(4, dtype=torch.bool, device=DEVICE)[2:]}
    assert_same(program(other, *given(DEVICE)[1:])["x"], function(*given("cpu"))["x"])  # laid out in another way


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 3), 2.0), r"arguments\[0\] has shape \(2, 3\) and torch.float32, and .* for \(3, 2\)"),
        ((torch.ones(3, 2, dtype=torch.float64), 2.0), r"arguments\[0\] has shape \(3, 2\) and torch.float64"),
        ((torch.ones(3, 2), 3.0), r"arguments\[1\] is 3.0, and the program was saved for 2.0, which is part of it"),
        ((torch.ones(3, 2), 2), r"arguments\[1\] is 2, and"),
        ((torch.ones(3, 2), torch.tensor(2.0)), r"arguments\[1\] is tensor"),
        ((1.0, 2.0), r"arguments\[0\] is a float, and the program was saved for a tensor"),
        ((torch.ones(3, 2),), "arguments has 1 items, and the program was saved for 2"),
        ((torch.ones(3, 2, device="meta"), 2.0), r"arguments\[0\] is on meta"),
    ],
)
def test_arguments_that_do_not_fit(arguments: tuple[Any, ...], message: str, tmp_path: Path) -> None:
    marid.save_program(tmp_path / "f", lambda x, factor: x * factor, torch.ones(3, 2, device=DEVICE), 2.0)
    program = marid.load_program(tmp_path / "f")
    with pytest.raises((TypeError, ValueError), match=message):
        program(*arguments)


def test_state_that_is_written(tmp_path: Path) -> None:
    """Caches, arguments, constants, and gradients that add up."""
    torch.manual_seed(0)

    def make(device: str) -> Any:
        cache, weight = torch.zeros(4, 3).to(device), torch.randn(3, 3).to(device).requires_grad_()
        index = torch.zeros(1, dtype=torch.int64).to(device)

        def function(x: torch.Tensor, total: torch.Tensor) -> Any:
            cache.index_copy_(0, index, x[None])
            index.add_(1).remainder_(4)
            (x @ weight).sum().backward()
            total.add_(x)
            one = torch.tensor([1.0, 2.0, 3.0], device=device)
            assert weight.grad is not None
            return cache, one.add_(x), weight.grad

        return function

    torch.manual_seed(1)
    eager = make("cpu")
    torch.manual_seed(1)
    lazy = make(DEVICE)
    xs, totals = torch.randn(6, 3), [torch.zeros(3).to(device) for device in ("cpu", DEVICE)]
    eager(xs[0], totals[0])
    lazy(xs[0].to(DEVICE), totals[1])
    marid.save_program(tmp_path / "f", lazy, xs[1].to(DEVICE), totals[1])
    program = marid.load_program(tmp_path / "f")
    for x in xs[1:]:
        assert_same(program(x.to(DEVICE), totals[1]), eager(x, totals[0]))
    assert_same(totals[1], totals[0])
    assert program.roles == {"cache": "tensor", "index": "tensor", "weight": "tensor", "weight.grad": "gradient"}
    assert_same(program.state["cache"], program(xs[0].to(DEVICE), totals[1])[0].cpu())
    with pytest.raises(ValueError, match="writes to an argument"):
        program(xs[0], torch.zeros(3))
    with pytest.raises(LazyTensorError, match="share memory"):
        program(xs[0].to(DEVICE), program.state["cache"][0])
    program.state["weight"].zero_()  # a user writes it
    assert_same(program(totals[1], torch.zeros(3, device=DEVICE))[0], program.state["cache"].cpu())


def test_tensors_of_the_host(tmp_path: Path) -> None:
    """Arguments and state that the function uploads, also with another dtype."""
    table = torch.arange(3.0)

    def function(x: torch.Tensor) -> Any:
        placed = torch.empty(3, device=DEVICE, dtype=torch.float64).copy_(x)
        return x, x.to(DEVICE).mul_(2) + table.to(DEVICE), placed

    x = torch.tensor([5.0, 6.0, 7.0])
    marid.save_program(tmp_path / "f", function, x)
    program = marid.load_program(tmp_path / "f")
    for _ in range(2):
        same, doubled, placed = program(x)
        assert same is x
        assert_same([doubled, placed], [torch.tensor([10.0, 13.0, 16.0]), x.double()])
    given = x.to(DEVICE)
    assert_same(program(given)[1], torch.tensor([10.0, 13.0, 16.0]))
    assert_same(given, x)


def test_several_modules_and_given_state(tmp_path: Path) -> None:
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 3).to(DEVICE), nn.Linear(3, 1).to(DEVICE)

    def function(x: torch.Tensor) -> torch.Tensor:
        return critic(generator(x))

    x = torch.randn(4, 2).to(DEVICE)
    marid.save_program(tmp_path / "f", function, x)
    program = marid.load_program(tmp_path / "f")
    assert set(program.state) == {"generator.weight", "generator.bias", "critic.weight", "critic.bias"}
    marid.save_program(tmp_path / "f", function, x, state=(generator, critic))
    other = marid.load_program(tmp_path / "f")
    assert_same([program(x), other(x)], [function(x).detach().cpu()] * 2)


@pytest.mark.in_process("workers do not have the operator")
def test_custom_operators(tmp_path: Path) -> None:
    """Those of namespaces that are named, when saving and when loading."""
    library = torch.library.Library("marid_saved_tests", "DEF")
    library.define("triple(Tensor x) -> Tensor")
    library.impl("triple", lambda x: x * 3, "CPU")
    library.impl("triple", torch.empty_like, "Meta")
    x = torch.ones(3, device=DEVICE)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.marid_saved_tests.triple(x + 1)

    with pytest.raises(UnsupportedOperationError, match="operators of 'marid_saved_tests' are not admitted"):
        marid.save_program(tmp_path / "f", function, x)
    marid.save_program(tmp_path / "f", function, x, namespaces=["marid_saved_tests"])
    with pytest.raises(ValueError, match="operators of 'marid_saved_tests' are not admitted"):
        marid.load_program(tmp_path / "f")
    program = marid.load_program(tmp_path / "f", namespaces=["marid_saved_tests"])
    assert_same(program(x), torch.full((3,), 6.0))


def test_errors_of_a_call_name_the_line(tmp_path: Path) -> None:
    def function(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x[index]

    marid.save_program(tmp_path / "f", function, torch.ones(3, device=DEVICE), torch.tensor([1], device=DEVICE))
    program = marid.load_program(tmp_path / "f")
    line = function.__code__.co_firstlineno + 1
    with pytest.raises(MaterializationError, match=f"test_save_program.py:{line}"):
        program(torch.ones(3), torch.tensor([7])).cpu()
    assert program(torch.ones(3), torch.tensor([2])).item() == 1


# --- elsewhere -----------------------------------------------------------------------------------------------------

_MODEL = """
import torch
def make(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.3), torch.nn.Linear(6, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()
    return step
"""
_CHILD = """
import sys, importlib.util, torch, marid
from marid.engine.safetensors import read_file, write_file
assert importlib.util.find_spec("a_model_of_a_test") is None
program = marid.load_program(sys.argv[1])
inputs = read_file(sys.argv[2])
torch.manual_seed(3)
losses = torch.stack([program(x).cpu() for x in inputs["x"].tensor.clone()])
write_file(sys.argv[3], {"losses": losses, **{k: v.cpu() for k, v in program.state.items()}}, {})
"""


def test_in_a_process_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_model_of_a_test.py").write_text(_MODEL)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        import a_model_of_a_test as module  # pyright: ignore[reportMissingImports]

    eager, step = module.make("cpu"), module.make(DEVICE)
    xs = torch.randn(4, 5, 4)
    for function, device in ((eager, "cpu"), (step, DEVICE)):
        torch.manual_seed(1)
        function(xs[0].to(device))
    marid.save_program(tmp_path / "step", step, xs[1].to(DEVICE))
    write_file(tmp_path / "inputs", {"x": xs}, {})
    command = [sys.executable, "-c", _CHILD, *(str(tmp_path / name) for name in ("step", "inputs", "outputs"))]
    done = subprocess.run(command, cwd="/", env=os.environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    outputs = {name: entry.tensor for name, entry in read_file(tmp_path / "outputs").items()}
    torch.manual_seed(3)
    assert_same(outputs["losses"], torch.stack([eager(x) for x in xs]))
    model = next(cell.cell_contents for cell in eager.__closure__ if isinstance(cell.cell_contents, nn.Module))
    assert_same({key: outputs[key] for key in model.state_dict()}, model.state_dict())


def test_on_a_worker(tmp_path: Path) -> None:
    _, losses, weights = _trained("convolutions", tmp_path / "step")
    with connected(2):
        program = marid.load_program(tmp_path / "step", f"{DEVICE}:2")
        torch.manual_seed(2)
        batches = [_to(batch, f"{DEVICE}:2") for batch in _batches("convolutions", 5)[1:]]
        assert_same([program(*batch) for batch in batches], losses)
        assert_same({key: program.state[key] for key in weights}, weights)
        del program, batches


# --- what cannot be saved ------------------------------------------------------------------------------------------


class _Counts:
    calls = 0.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


_generator: Any = None
_halves: Any = None
_leaf: Any = None


@pytest.fixture(autouse=True, scope="module")
def _of_the_module() -> Iterator[None]:
    """What the functions below refer to: on the device as long as these tests run, since tests of workers take it."""
    buffer, leaf = torch.zeros(4, device=DEVICE), torch.ones(2, device=DEVICE, requires_grad=True)
    leaf.grad = torch.ones(2, device=DEVICE)
    made = {
        "_generator": torch.Generator(DEVICE),
        "_buffer": buffer,
        "_halves": (buffer[:2], buffer[2:]),
        "_leaf": leaf,
    }
    globals().update(made)
    yield
    for name in made:
        del globals()[name]


def _replaces_a_gradient(x: torch.Tensor) -> None:
    _leaf.grad = _leaf.grad + x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x * x.sum().item(), r"(?s)test_save_program.py:\d+\) cannot be saved: .*item.*test_save_program.py"),
        (_Counts(), "it changes Python state: .*calls"),
        (lambda x: x * random.random(), "test_save_program.py"),
        (lambda x: x + torch.rand(2).to(DEVICE), "drawn on the host"),
        (lambda x: x + torch.rand(2, device=DEVICE, generator=_generator), "draws from a generator of its own"),
        (lambda x: _halves[1].add_(x), "its state .* is a view of other memory"),
        (lambda x: slice(3), "its result is a slice: a file has"),
        (lambda x: torch.return_types.max(x.max(0)), "cannot be saved"),  # pyright: ignore[reportCallIssue]
        (_replaces_a_gradient, "replaces a gradient that it reads"),
    ],
)
def test_what_is_refused(function: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOperationError, match=message):
        marid.save_program(tmp_path / "f", function, torch.ones(2, device=DEVICE))
    assert not list(tmp_path.iterdir())


def test_arguments_that_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"examples\[1\]\['model'\] is a Linear: a file has"):
        marid.save_program(tmp_path / "f", lambda x, y: x, torch.ones(2, device=DEVICE), {"model": nn.Linear(1, 1)})


def test_an_error_of_the_function_undoes_its_calls(tmp_path: Path) -> None:
    state = torch.zeros(2, device=DEVICE)

    def function(x: torch.Tensor) -> None:
        state.add_(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        marid.save_program(tmp_path / "f", function, torch.ones(2, device=DEVICE))
    assert_same(state, torch.zeros(2))


# --- files that are damaged, or lie --------------------------------------------------------------------------------


def _small(path: Path) -> None:
    """A step with draws, counters, lists, numbers and views."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).to(DEVICE)
    step = _step(model, torch.optim.AdamW(model.parameters()), F.mse_loss)
    marid.save_program(path, step, torch.randn(2, 3).to(DEVICE), torch.randn(2, 2).to(DEVICE))


def _call(path: Path) -> None:
    """Load and run it; anything but a clear error is a failure."""
    try:
        program = marid.load_program(path)
        program(torch.ones(2, 3), torch.ones(2, 2)).cpu()
    except (ValueError, TypeError, RuntimeError, ArithmeticError):
        pass


def test_damaged_files(tmp_path: Path) -> None:
    _small(tmp_path / "step")
    data = (tmp_path / "step").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    bad = tmp_path / "bad"
    for length in (0, 5, 8, 9, header // 2, header, header + 1, len(data) - 1):
        bad.write_bytes(data[:length])
        with pytest.raises(ValueError, match="bad"):
            marid.load_program(bad)
    chance = random.Random(0)
    for _ in range(100):
        place = chance.randrange(header)
        bad.write_bytes(data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :])
        with pytest.raises(ValueError, match="bad"):
            marid.load_program(bad)
    write_file(bad, {}, {})
    with pytest.raises(ValueError, match="has no program in it"):
        marid.load_program(bad)


def _rewritten(path: Path, target: Path, text: str) -> None:
    tensors = {name: entry.tensor for name, entry in read_file(path).items()}
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    write_file(target, tensors, {ENTRY: text, DIGEST: digest})


def _mutated(data: Any, chance: random.Random) -> Any:
    """The same with one thing changed somewhere."""
    places: list[tuple[Any, Any]] = []

    def visit(item: Any) -> None:
        for key in item if isinstance(item, dict) else range(len(item)):
            places.append((item, key))
            if isinstance(item[key], (dict, list)):
                visit(item[key])

    visit(data)
    container, key = chance.choice(places)
    old = container[key]
    others: list[Any] = [0, 1, -1, 7, 1 << 40, 1 << 70, 0.5, -1e300, None, True, "%0", "%1", "x", [], {}, [1, 2]]
    others += ["aten.set_.source_Tensor", "aten.as_strided.default", {"draw": 9}, {"value": 1}, {"float": "nan"}]
    if type(old) is int:
        others = [*others, old + 1, old - 1, old * 1000] * 2
    if isinstance(container, dict) and chance.random() < 0.2:
        del container[key]
    elif isinstance(container, list) and chance.random() < 0.2:
        container.insert(key, chance.choice([old, *others]))
    else:
        container[key] = chance.choice(others)
    return data


@pytest.mark.mispredicts
def test_files_that_lie(tmp_path: Path) -> None:
    """With the digest of what they say."""
    _small(tmp_path / "step")
    text = read_metadata(tmp_path / "step")[ENTRY]
    _rewritten(tmp_path / "step", tmp_path / "same", text)
    assert marid.load_program(tmp_path / "same")(torch.ones(2, 3), torch.ones(2, 2)).shape == ()
    chance = random.Random(int(os.environ.get("MARID_FUZZ_SEED", "0")))
    for _ in range(int(os.environ.get("MARID_FUZZ_FILES", "150"))):
        data = _mutated(json.loads(text), chance)
        _rewritten(tmp_path / "step", tmp_path / "bad", json.dumps(data))
        _call(tmp_path / "bad")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"target":"aten.addmm.default"', '"target":"aten.load.default"', "there is no operator|not admitted"),
        ('"target":"aten.addmm.default"', '"target":"os.system.default"', "operators of 'os' are not admitted"),
        ('"version":1', '"version":2', "version 2 of the format, and version 1 is read"),
        ('"name":"%0"', '"name":"%999999"', "slots are not numbered|makes|is none|defined|no name|twice|given"),
        ("[4,3]", "[4,4]", "is not what the program says|it cannot be called so|returns|lie side by side"),
        ('"float32"', '"object"', "there is no dtype 'object'"),
        ('"role":"parameter"', '"role":NaN', "its text is no JSON"),
        ('"state":"0.bias"}', '"state":"2.bias"}', "another tensor there|is an input twice"),
    ],
)
def test_lies_that_are_told(before: str, after: str, message: str, tmp_path: Path) -> None:
    _small(tmp_path / "step")
    text = read_metadata(tmp_path / "step")[ENTRY]
    assert before in text
    _rewritten(tmp_path / "step", tmp_path / "bad", text.replace(before, after))
    with pytest.raises(ValueError, match=f"bad is no program that can be run: .*({message})"):
        marid.load_program(tmp_path / "bad")


def test_an_argument_that_is_only_read_in_memory_that_is_written(tmp_path: Path) -> None:
    """The function sees what it has written; a copy would not."""
    count = torch.zeros(4, device=DEVICE)

    def function(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x * 2 + count

    marid.save_program(tmp_path / "f", function, torch.ones(4, device=DEVICE))
    program = marid.load_program(tmp_path / "f", DEVICE)
    assert program(torch.ones(4, device=DEVICE)).tolist() == [3.0] * 4
    [own] = program.state.values()
    for given in (own, own[:]):
        with pytest.raises(LazyTensorError, match="share memory"):
            program(given)
    assert own.tolist() == [1.0] * 4
    assert program(own.clone()).tolist() == [4.0] * 4
