"""Random numbers: the same stream as the CPU generator, whatever runs when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import marid
from marid.graph import mersenne_twister
from tests.helpers import DEVICE, assert_same, on_both, seeded, train_step

device_module: Any = torch.remote_accelerator  # type: ignore[attr-defined]

DRAWS: dict[str, Callable[[str], torch.Tensor]] = {
    "rand": lambda d: torch.rand(7, device=d),
    "rand float64": lambda d: torch.rand(7, dtype=torch.float64, device=d),
    "rand bfloat16": lambda d: torch.rand(7, dtype=torch.bfloat16, device=d),
    "rand complex": lambda d: torch.rand(7, dtype=torch.complex64, device=d),
    "rand_like": lambda d: torch.rand_like(torch.zeros(2, 3, device=d)),
    "uniform_": lambda d: torch.empty(5, device=d).uniform_(-1, 2),
    "uniform_ default": lambda d: torch.empty(5, device=d).uniform_(),
    "uniform_ strided": lambda d: torch.zeros(4, 4, device=d).t()[::2].uniform_(),
    "randn": lambda d: torch.randn(5, device=d),
    "randn 15": lambda d: torch.randn(15, device=d),
    "randn 16": lambda d: torch.randn(16, device=d),
    "randn 17": lambda d: torch.randn(17, device=d),
    "randn 33 float64": lambda d: torch.randn(33, dtype=torch.float64, device=d),
    "randn 3 bfloat16": lambda d: torch.randn(3, dtype=torch.bfloat16, device=d),
    "randn 17 bfloat16": lambda d: torch.randn(17, dtype=torch.bfloat16, device=d),
    "randn complex": lambda d: torch.randn(9, dtype=torch.complex64, device=d),
    "randn_like strided": lambda d: torch.randn_like(torch.zeros(5, 4, device=d).t()),
    "normal_": lambda d: torch.empty(5, device=d).normal_(2, 3),
    "normal_ default": lambda d: torch.empty(20, device=d).normal_(),
    "normal_ strided": lambda d: torch.zeros(6, 6, device=d).t()[1:].normal_(),
    "normal floats": lambda d: torch.normal(1.0, 2.0, (3,), device=d),
    "normal tensors": lambda d: torch.normal(torch.ones(3, device=d), torch.full((3,), 0.5, device=d)),
    "randint": lambda d: torch.randint(0, 10, (5,), device=d),
    "randint one bound": lambda d: torch.randint(10, (5,), device=d),
    "randint wide": lambda d: torch.randint(-(1 << 40), 1 << 40, (5,), device=d),
    "randint_like": lambda d: torch.randint_like(torch.zeros(4, device=d), 3, 9),
    "random_": lambda d: torch.empty(5, device=d).random_(),
    "random_ int64": lambda d: torch.zeros(5, dtype=torch.int64, device=d).random_(),
    "random_ bounds": lambda d: torch.empty(5, device=d).random_(3, 20),
    "randperm": lambda d: torch.randperm(9, device=d),
    "randperm 1": lambda d: torch.randperm(1, device=d),
    "bernoulli_ half": lambda d: torch.empty(9, device=d).bernoulli_(0.5),
    "bernoulli_ other": lambda d: torch.empty(9, device=d).bernoulli_(0.3),
    "bernoulli_ tensor": lambda d: torch.empty(9, device=d).bernoulli_(torch.full((9,), 0.3, device=d)),
    "bernoulli": lambda d: torch.bernoulli(torch.full((9,), 0.3, device=d)),
    "bernoulli p": lambda d: torch.bernoulli(torch.zeros(9, device=d), 0.7),
    "exponential_": lambda d: torch.empty(9, device=d).exponential_(),
    "exponential_ rate": lambda d: torch.empty(9, device=d).exponential_(2.0),
    "geometric_": lambda d: torch.empty(9, device=d).geometric_(0.4),
    "cauchy_": lambda d: torch.empty(9, device=d).cauchy_(),
    "log_normal_": lambda d: torch.empty(9, device=d).log_normal_(),
    "multinomial": lambda d: torch.multinomial(torch.tensor([0.1, 0.6, 0.3], device=d), 2),
    "multinomial one": lambda d: torch.multinomial(torch.tensor([[0.1, 0.9], [0.5, 0.5]], device=d), 1),
    "multinomial again": lambda d: torch.multinomial(torch.tensor([0.1, 0.6, 0.3], device=d), 8, replacement=True),
    "dropout": lambda d: nn.functional.dropout(torch.ones(9, device=d)),
    "dropout 0.1": lambda d: nn.functional.dropout(torch.ones(9, device=d), 0.1),
    "dropout all": lambda d: nn.functional.dropout(torch.ones(9, device=d), 1.0),
    "dropout none": lambda d: nn.functional.dropout(torch.ones(9, device=d), 0.0),
    "alpha_dropout": lambda d: nn.functional.alpha_dropout(torch.ones(9, device=d), 0.3, training=True),
    "dropout2d": lambda d: nn.functional.dropout2d(torch.ones(2, 3, 2, 2, device=d), 0.5),
    "rrelu": lambda d: nn.functional.rrelu(-torch.ones(9, device=d), training=True),
    "gumbel_softmax": lambda d: nn.functional.gumbel_softmax(torch.zeros(2, 4, device=d)),
    "poisson": lambda d: torch.poisson(torch.full((5,), 4.0, device=d)),
    "binomial": lambda d: torch.binomial(torch.full((5,), 10.0, device=d), torch.full((5,), 0.4, device=d)),
    "gamma": lambda d: torch._standard_gamma(torch.full((5,), 2.0, device=d)),
    "empty": lambda d: torch.randn(0, device=d),
    "kaiming": lambda d: nn.init.kaiming_uniform_(torch.empty(4, 4, device=d)),
    "trunc_normal": lambda d: nn.init.trunc_normal_(torch.empty(4, 4, device=d)),
    "fractional_max_pool": lambda d: nn.functional.fractional_max_pool2d(torch.ones(1, 1, 6, 6, device=d), 2, (3, 3)),
}


@pytest.mark.parametrize("before", [0, 1], ids=["fresh", "with a spare normal"])
@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_takes_what_the_cpu_generator_gives(name: str, before: int) -> None:
    """The numbers themselves, and what is left in the stream: a second draw of each kind is right too."""

    def run(device: str) -> list[torch.Tensor]:
        torch.randn(before, device=device)
        first = DRAWS[name](device)
        return [first, torch.rand(3, device=device), DRAWS[name](device), torch.randn(3, device=device)]

    on_both(run)


@pytest.mark.in_process("operations run at once in this process alone")
@pytest.mark.parametrize("before", [0, 1], ids=["fresh", "with a spare normal"])
@pytest.mark.parametrize("name", DRAWS)
def test_what_runs_at_once_takes_what_it_takes(name: str, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much that was is measured, also where recorded draws, other seeds and earlier states come between."""
    monkeypatch.setattr(marid.settings, "immediate_after", 0)

    def run(device: str) -> list[torch.Tensor]:
        results = []
        module: Any = torch if device == "cpu" else device_module
        for seed in (0, 0, 5):
            torch.ones(1, device=device).item()
            torch.manual_seed(seed)
            torch.randn(before, device=device)
            results += [DRAWS[name](device), torch.rand(3, device=device)]
            state = module.get_rng_state()
            results += [DRAWS[name](device), torch.randn(3, device=device)]
            with monkeypatch.context() as context:
                context.setattr(marid.settings, "immediate_bytes", 0)
                results.append(torch.rand(700, device=device))
            torch.ones(1, device=device).item()
            results.append(DRAWS[name](device))
            module.set_rng_state(state)
            results += [DRAWS[name](device), torch.randn(624, device=device), torch.randn(1, device=device)]
        return results

    draws = marid.stats().ops_immediate
    on_both(run)
    assert marid.stats().ops_immediate > draws


@pytest.mark.in_process("operations run at once in this process alone")
def test_a_draw_at_once_that_fails_takes_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marid.settings, "immediate_after", 0)

    def run(device: str) -> torch.Tensor:
        wrong, right = torch.zeros(3, device=device), torch.ones(3, device=device)
        torch.multinomial(right, 1).item()
        with pytest.raises(RuntimeError, match="invalid multinomial distribution"):
            torch.multinomial(wrong, 1)
        return torch.rand(3, device=device)

    on_both(run)


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("immediate_bytes", [0, 1 << 20], ids=["recorded", "at once"])
def test_threads_draw_different_numbers(immediate_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together what one thread alone would draw."""
    monkeypatch.setattr(marid.settings, "immediate_after", 0)
    monkeypatch.setattr(marid.settings, "immediate_bytes", immediate_bytes)
    torch.ones(1, device=DEVICE).item()
    torch.manual_seed(0)
    expected = torch.cat([torch.rand(10) for _ in range(200)])
    torch.manual_seed(0)
    drawn: list[list[torch.Tensor]] = [[] for _ in range(4)]

    def draw(into: list[torch.Tensor]) -> None:
        into.extend(torch.rand(10, device=DEVICE) for _ in range(50))

    threads = [threading.Thread(target=draw, args=(into,)) for into in drawn]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = torch.cat([one for into in drawn for one in into]).cpu()
    assert torch.equal(together.sort().values, expected.sort().values)


def test_numbers_do_not_depend_on_when_or_whether_others_run() -> None:
    """Reading in any order, or not at all, changes nothing."""

    def draws() -> list[torch.Tensor]:
        torch.manual_seed(3)
        return [torch.randn(3, device=DEVICE), torch.rand(20, device=DEVICE), torch.empty(5, device=DEVICE).normal_()]

    expected = [t.tolist() for t in draws()]
    tensors = draws()
    assert tensors[2].tolist() == expected[2]
    assert tensors[0].tolist() == expected[0]
    del tensors[1]
    assert draws()[1].tolist() == expected[1]
    torch.manual_seed(3)
    torch.randn(3, device=DEVICE), torch.rand(20, device=DEVICE)
    assert torch.empty(5, device=DEVICE).normal_().tolist() == expected[2]


def test_equal_seeds_give_equal_runs() -> None:
    """Also on every device index, each with a stream of its own."""
    runs = []
    for _ in range(2):
        torch.manual_seed(7)
        runs.append([torch.rand(4, device=f"{DEVICE}:{index}").tolist() for index in (0, 1, 0)])
    assert runs[0] == runs[1]
    assert runs[0][0] == runs[0][1]
    assert runs[0][0] != runs[0][2]


def test_different_seeds_differ_and_negative_seeds_are_allowed() -> None:
    """As for the CPU generator."""
    seen = set()
    for seed in (0, 1, -1, (1 << 40) + 5):
        torch.manual_seed(seed)
        expected = torch.rand(3)
        torch.manual_seed(seed)
        x = torch.rand(3, device=DEVICE)
        assert_same(x, expected)
        seen.add(tuple(x.tolist()))
    assert len(seen) == 4


def test_get_and_set_state() -> None:
    """A state replays what followed it, also one taken with half of a normal pair used."""
    torch.randn(3, device=DEVICE)
    state = device_module.get_rng_state()
    first = [torch.randn(3, device=DEVICE).tolist(), torch.rand(2, device=DEVICE).tolist()]
    device_module.set_rng_state(state)
    assert [torch.randn(3, device=DEVICE).tolist(), torch.rand(2, device=DEVICE).tolist()] == first
    assert state.dtype is torch.uint8
    assert state.device.type == "cpu"
    with pytest.raises(RuntimeError, match="state"):
        device_module.set_rng_state(torch.zeros(3, dtype=torch.uint8))


def test_state_of_all_devices() -> None:
    """Saved and restored together."""
    states = device_module.get_rng_state_all()
    assert len(states) == device_module.device_count()
    first = [torch.rand(2, device=f"{DEVICE}:{i}").tolist() for i in (0, 2)]
    device_module.set_rng_state_all(states)
    assert [torch.rand(2, device=f"{DEVICE}:{i}").tolist() for i in (0, 2)] == first


def test_fork_rng() -> None:
    """What happens inside leaves the streams as they were."""
    expected = (torch.rand(2), torch.rand(2, device=DEVICE).tolist())
    torch.manual_seed(0)
    with torch.random.fork_rng(devices=[0], device_type=DEVICE):
        torch.manual_seed(99)
        torch.rand(100, device=DEVICE)
        torch.rand(100)
    assert_same(torch.rand(2), expected[0])
    assert torch.rand(2, device=DEVICE).tolist() == expected[1]


def test_module_level_seeding() -> None:
    """``torch.remote_accelerator.manual_seed`` seeds the device and leaves the CPU alone."""
    device_module.manual_seed(5)
    first = torch.rand(3, device=DEVICE).tolist()
    cpu = torch.get_rng_state()
    device_module.manual_seed_all(5)
    assert torch.rand(3, device=DEVICE).tolist() == first
    assert torch.equal(torch.get_rng_state(), cpu)
    assert device_module.initial_seed() == 5
    device_module.seed()
    assert device_module.initial_seed() != 5


@pytest.mark.usefixtures("either_way")
def test_generators() -> None:
    """A ``torch.Generator`` on the device has its own stream, equal to a CPU generator's."""

    def run(device: str) -> list[Any]:
        generator = torch.Generator(device).manual_seed(11)
        a = torch.rand(3, generator=generator, device=device)
        b = torch.randn(3, generator=generator, device=device)
        c = torch.empty(4, device=device).uniform_(generator=generator)
        d = torch.randperm(5, generator=generator, device=device)
        e = torch.bernoulli(torch.full((4,), 0.5, device=device), generator=generator)
        unaffected = torch.rand(2, device=device)
        generator.manual_seed(11)
        return [a, b, c, d, e, unaffected, torch.rand(3, generator=generator, device=device), generator.initial_seed()]

    on_both(run)


def test_generator_state() -> None:
    """Saved, restored, cloned."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    torch.rand(3, generator=generator, device=DEVICE)
    state = generator.get_state()
    first = torch.rand(3, generator=generator, device=DEVICE).tolist()
    generator.set_state(state)
    assert torch.rand(3, generator=generator, device=DEVICE).tolist() == first
    assert generator.device.type == DEVICE


def test_a_generator_of_another_device_is_refused() -> None:
    """PyTorch's error, at the line."""
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, generator=torch.Generator(), device=DEVICE)


def test_two_readers_of_one_draw_see_the_same_numbers() -> None:
    """A random node runs once."""
    x = torch.randn(5, device=DEVICE)
    y = x * 2
    assert y.tolist() == [2 * v for v in x.tolist()]


def test_training_with_dropout_equals_eager() -> None:
    """Many steps, dropout in forward, random data: bitwise the same losses."""

    def train(device: str) -> list[Any]:
        layers = [nn.Linear(4, 16), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)]
        model = seeded(nn.Sequential(*layers), device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(5):
            x = torch.randn(8, 4, device=device)
            losses.append(train_step(optimizer, model(x).square().mean()))
        return losses

    on_both(train)


def test_random_work_is_recorded_not_run() -> None:
    """The usual random operations are nodes like any other."""
    x = torch.randn(20, device=DEVICE)
    kept = [
        torch.rand_like(x),
        nn.functional.dropout(x, 0.5),
        x.clone().uniform_(),
        x.clone().bernoulli_(0.5),
        torch.randperm(5, device=DEVICE),
        torch.randint(0, 4, (3,), device=DEVICE),
        torch.bernoulli(torch.rand(4, device=DEVICE)),
        x.clone().exponential_(),
    ]
    assert marid.stats().ops_executed == 0
    assert marid.stats().fallbacks == {}
    assert all(not t.materialized for t in kept)  # type: ignore[attr-defined]


def test_draws_by_rejection_are_no_fallbacks() -> None:
    """How many numbers they take depends on data, so they run at once; their derivatives are recorded."""

    def draw(device: str) -> list[torch.Tensor]:
        seeded(nn.Identity(), device)
        a = torch.tensor([[0.5, 2.0], [3.0, 0.1], [7.0, 9.0]]).to(device).requires_grad_()
        made = [
            torch.distributions.Dirichlet(a, validate_args=False).rsample(),
            torch.distributions.Gamma(a.T, a.T, validate_args=False).rsample(),
            torch.distributions.Beta(a, a + 1, validate_args=False).rsample((2,)),
            torch.binomial((a * 9).detach().floor(), a.detach().sigmoid()),
        ]
        gradient = torch.autograd.grad(sum((t * t).sum() for t in made), a)
        return [*made, *gradient]

    got = draw(DEVICE)
    assert marid.stats().fallbacks == {}
    assert marid.stats().dynamic == {"aten::_sample_dirichlet": 2, "aten::_standard_gamma": 1, "aten::binomial": 1}
    for one, other in zip(got, draw("cpu"), strict=True):
        assert torch.equal(one.cpu(), other)
        assert one.stride() == other.stride()
    with pytest.raises(RuntimeError, match="must match the size"):
        torch._dirichlet_grad(*torch.rand(2, 3, 4, device=DEVICE), torch.rand(3, 2, device=DEVICE))


def test_generators_of_the_cpu_where_the_device_is_the_default() -> None:
    """Scripts that name no device make generators without naming one either, and get the numbers they always got."""

    def draw() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        drawn = [torch.randperm(6, generator=generator), torch.randn(4, generator=generator)]
        return [*drawn, torch.empty(3).uniform_(generator=generator)]

    expected = draw()
    with torch.device(DEVICE):
        drawn = draw()
    assert all(t.device.type == DEVICE for t in drawn)
    assert [t.tolist() for t in drawn] == [t.tolist() for t in expected]


def test_a_generator_of_the_cpu_where_the_device_is_named() -> None:
    """As on any other device."""
    with pytest.raises(RuntimeError, match="Expected a 'remote_accelerator' device type for generator"):
        torch.randn(2, device=DEVICE, generator=torch.Generator())


def _closed_over(f: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda: f(x).exp(), use_reentrant=False)


def _named(f: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda *, q: f(q).exp(), q=x, use_reentrant=False)


def _positional(f: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda q: f(q).exp(), x, use_reentrant=True)


@pytest.mark.parametrize("recomputed", [_closed_over, _named, _positional])
def test_what_is_computed_again_draws_what_it_drew(recomputed: Any) -> None:
    """However a checkpointed function gets its tensors: PyTorch keeps generators of devices by positional arguments."""
    cpu = torch.ones(2, requires_grad=True)
    checkpoint(lambda x: x * 2, cpu, use_reentrant=False).sum().backward()

    def run(device: str) -> list[Any]:
        torch.manual_seed(0)
        x = torch.ones(64, device=device, requires_grad=True)
        y = recomputed(lambda q: torch.nn.functional.dropout(q, 0.5), x)
        y.sum().backward()
        return [y, x.grad, torch.rand(2, device=device)]

    assert_same(run(DEVICE), run("cpu"))


def test_spares_that_are_made_within_a_draw(at_once: None) -> None:
    """Gamma numbers take normal ones in pairs, and words behind them: where the last pair began is looked for."""

    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        shape, made = torch.linspace(0.05, 4, 9).to(device), []
        for i in range(40):
            made.append(torch._standard_gamma(shape + 0.1 * i))
            made.append(torch.distributions.Beta(shape, shape.flip(0)).sample())
            made.append(torch.normal(shape.double(), shape.double()))
            made.append(torch.rand(i, device=device))
        return made

    for found, expected in zip(run(DEVICE), run("cpu"), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)


def test_generators_of_the_user_draw_at_once(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each moves on by what it gave, by turns with others, with the device's and with what is recorded."""

    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        one, other = (torch.Generator(device).manual_seed(seed) for seed in (7, -3))
        probabilities, made = torch.linspace(0.1, 0.9, 6).to(device), []
        for i in range(30):
            generator = one if i % 3 else other
            made.append(torch.randn(i, device=device, generator=generator))
            made.append(torch.normal(probabilities.double(), 2.0, generator=generator))
            made.append(torch.bernoulli(probabilities, generator=generator))
            made.append(torch.multinomial(probabilities, 2, generator=generator))
            made.append(torch._standard_gamma(probabilities, generator=generator))
            made.append(torch.empty(3, device=device).exponential_(generator=generator))
            made.append(torch.rand(1, device=device))
            if i % 7 == 0:
                other.manual_seed(i)
            if i % 11 == 0:
                kept = one.get_state()
                made.append(torch.randperm(9, device=device, generator=one))
                one.set_state(kept)
            with monkeypatch.context() as context:
                context.setattr(marid.settings, "immediate_bytes", 0)
                made.append(torch.rand(600, device=device, generator=one))
        return made

    count = marid.stats().ops_immediate
    for found, expected in zip(run(DEVICE), run("cpu"), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)
    assert marid.stats().ops_immediate - count > 200


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, *of: torch.poisson(x, *of),
        lambda x, *of: torch.binomial(x, x / 9, *of),
        lambda x, *of: torch._standard_gamma(x, *of),
        lambda x, *of: torch._sample_dirichlet(x, *of),
        lambda x, *of: torch.rrelu(-x, 0.1, 0.3, True, *of),
        lambda x, *of: torch.rrelu_(-x, 0.1, 0.3, True, *of),
    ],
)
def test_generators_that_are_no_named_arguments(either_way: None, draw: Callable[..., torch.Tensor]) -> None:
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(5)
        x, generator = torch.arange(1.0, 9, device=device), torch.Generator(device).manual_seed(3)
        draws = [draw(x, *of).clone() for of in ([], [generator], [None], [generator], [])]
        return [*draws, torch.rand(3, device=device), torch.rand(3, generator=generator, device=device)]

    assert_same(run(DEVICE), run("cpu"))


def test_a_generator_of_the_user_that_fails_at_once_takes_what_it_took(at_once: None) -> None:
    def run(device: str) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(2)
        with pytest.raises(RuntimeError, match="invalid multinomial distribution"):
            torch.multinomial(torch.zeros(3, device=device), 1, generator=generator)
        return torch.rand(3, device=device, generator=generator)

    on_both(run)


def test_a_generator_of_the_cpu_is_refused_at_once(at_once: None) -> None:
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, generator=torch.Generator(), device=DEVICE)
    with pytest.raises(RuntimeError, match="generator"):
        torch.ones(3, device=DEVICE).normal_(generator=torch.Generator())


class _Counted:
    """Where skipped numbers go, and how many there were."""

    def __init__(self, kept: torch.Tensor) -> None:
        self.kept, self.words = kept, 0

    def __getitem__(self, some: slice) -> torch.Tensor:
        self.words += int(some.stop)
        return self.kept[some]


@pytest.mark.parametrize("first", [0, 3], ids=["no spare", "with a spare"])
def test_large_draws_that_are_read_backwards_skip_little(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)
    counted = _Counted(mersenne_twister._SKIPPED)
    monkeypatch.setattr(mersenne_twister, "_SKIPPED", counted)
    large, count = 3 << 20, 12

    def draw(device: str) -> list[torch.Tensor]:
        torch.manual_seed(94)
        _before = torch.randn(first, device=device)  # an odd number leaves one of a pair for later
        drawn = [torch.empty(large, device=device).uniform_() for _ in range(count)]
        last = torch.randn(1, device=device)
        return [*(one[:9].cpu() for one in reversed(drawn)), last.cpu()]

    assert_same(draw(DEVICE), draw("cpu"))
    assert counted.words < 3 * count * large
