"""Products by the faster kernel are, bit for bit, what eager PyTorch computes; and it is used only where it is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch

import marid
from marid.native import gemm

DEVICE = "remote_accelerator"
pytestmark = [
    pytest.mark.in_process("counts products in this process"),
]


@pytest.fixture(autouse=True)
def every_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Try every class when it is first met, and whatever the speed; nothing is compiled, and everything recorded."""
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)
    gemm.configure(also_slower=True, share=1.0, uses=0, work=0.0)
    before, marid.settings.compile = marid.settings.compile, False
    yield
    marid.settings.compile = before
    gemm.configure()


@pytest.fixture(params=[1, 2])
def one_or_two_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(torch.int32)


def ran(function: Callable[..., torch.Tensor], *given: torch.Tensor, times: int = 3) -> int:
    """Compare ``function`` on the device with the CPU, several times; how many products the faster kernel computed
    behind the first time, which goes through Python for a new program."""
    wanted = bits(function(*given))
    moved = [tensor.to(DEVICE).as_strided(tensor.shape, tensor.stride()) for tensor in given]
    counts = []
    for _ in range(times):
        torch.testing.assert_close(bits(function(*moved)), wanted, rtol=0, atol=0)
        counts.append(gemm.count())
    return counts[-1] - counts[0]


def is_used(rows: int = 64, depth: int = 64, columns: int = 64) -> bool:
    """Whether this machine's BLAS adds sums of this kind up in an order that the kernel can follow."""
    return ran(lambda a, b: a @ b, torch.randn(rows, depth), torch.randn(depth, columns)) > 0


def matrix(rows: int, columns: int, by_rows: bool, batch: int = 0) -> torch.Tensor:
    lead = (batch,) if batch else ()
    return torch.randn(*lead, rows, columns) if by_rows else torch.randn(*lead, columns, rows).transpose(-1, -2)


@pytest.mark.usefixtures("one_or_two_threads")
@pytest.mark.parametrize("seed", range(8))
def test_random_products_are_bitwise_equal(seed: int) -> None:
    torch.manual_seed(seed)
    pick = random.Random(seed)
    for _ in range(12):
        rows, columns = (pick.choice([pick.randint(1, 70), pick.randint(16, 300), 64, 128]) for _ in range(2))
        depth = pick.choice([pick.randint(1, 192), pick.randint(193, 400), pick.randint(401, 1500), 256, 512])
        first, second = pick.random() < 0.5, pick.random() < 0.5
        kind = pick.choice(["mm", "bmm", "addmm", "row", "linear"])
        batch = pick.randint(1, 5) if kind == "bmm" else 0
        a, b = matrix(rows, depth, first, batch), matrix(depth, columns, second, batch)
        if kind in ("mm", "bmm"):
            ran(torch.matmul, a, b)
        elif kind == "linear":
            ran(torch.nn.functional.linear, torch.randn(3, rows, depth), b.t().contiguous(), torch.randn(columns))
        else:
            ran(torch.addmm, torch.randn(columns) if kind == "row" else torch.randn(rows, columns), a, b)


def test_the_kernel_is_used() -> None:
    if not is_used():
        pytest.skip("BLAS adds up in another order here")
    for depth in (64, 500) if is_used(depth=500) else (64,):
        a, b = torch.randn(64, depth), torch.randn(depth, 48)
        assert ran(lambda a, b: a @ b, a, b) > 0
        assert ran(lambda a, b: a.t() @ b.t(), a.t().contiguous(), b.t().contiguous()) > 0
    assert ran(torch.nn.functional.linear, torch.randn(2, 32, 40), torch.randn(32, 40)) > 0
    assert ran(lambda a, b: torch.bmm(a, b), torch.randn(3, 20, 30), torch.randn(3, 30, 20)) > 0


def test_signed_zeros_infinities_and_nan() -> None:
    for depth in (8, 64, 256, 500):
        a, b = torch.randn(32, depth), torch.randn(depth, 32)
        a[0], a[1], a[2, 0], a[3, 1], a[4] = 0.0, -0.0, float("inf"), float("nan"), 1e-40
        b[:, 0], b[:, 1] = 0.0, -b[:, 1].abs()
        ran(lambda a, b: a @ b, a, b)
        ran(lambda a, b, c: torch.addmm(c, a, b), a, b, torch.full((32,), -0.0))


def test_rows_with_gaps_and_repeated_matrices() -> None:
    wide = torch.randn(64, 3 * 64)
    ran(lambda x, w: sum(part @ w for part in x.split(64, 1)), wide, torch.randn(64, 64))
    ran(lambda x, w: x[:, 1:, 3:] @ w, torch.randn(4, 33, 67), torch.randn(64, 64))
    ran(lambda x, w: torch.bmm(x, w.expand(4, -1, -1)), torch.randn(4, 32, 64), torch.randn(64, 48))
    ran(lambda x, w: torch.bmm(x.transpose(0, 1), w), torch.randn(32, 4, 64), torch.randn(4, 64, 48))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("two_threads")
def test_a_single_row_is_shared_by_threads_and_bitwise_equal(seed: int) -> None:
    if not is_used(1, 512, 1024):
        pytest.skip("BLAS adds the sums of a row up in another order here")
    torch.manual_seed(seed)
    pick = random.Random(seed)
    linear = torch.nn.functional.linear
    for _ in range(5):
        depth = pick.choice([pick.randint(200, 600), pick.randint(600, 3000), 512, 768, 4096])
        columns = max(128, -(-(1 << 18) // depth)) + pick.choice([0, 64, pick.randint(1, 700)])
        b = matrix(depth, columns, pick.random() < 0.5)
        row, wide = torch.randn(1, depth), torch.randn(3, depth + 9)
        assert ran(torch.mm, row, b) > 0
        assert ran(lambda x, b: x[1:2, 5:-4] @ b, wide, b) > 0  # where it begins in a cache line matters to BLAS
        assert ran(lambda x, b: x.t() @ b, row.t().contiguous(), b) > 0
        assert ran(torch.addmm, torch.randn(columns), row, b) > 0
        assert ran(torch.addmm, torch.randn(1, columns), row, b) > 0
        ran(lambda x, w: linear(x[:, -1:], w), torch.randn(1, 3, depth), b.t().contiguous())  # folds, or does not
        assert ran(linear, torch.randn(1, 1, depth), b.t().contiguous(), torch.randn(columns)) > 0


@pytest.mark.usefixtures("two_threads")
def test_special_numbers_in_a_single_row() -> None:
    row, b, bias = torch.randn(1, 512), torch.randn(600, 512), torch.full((600,), -0.0)
    row[0, :2], row[0, 7] = -0.0, 1e-40
    b[0], b[1], b[590, 3], b[599, 5], b[300] = 0.0, -0.0, float("inf"), float("nan"), 1e-40
    assert ran(lambda x, w: x @ w.t(), row, b) > 0
    assert ran(lambda c, x, w: torch.addmm(c, x, w.t()), bias, row, b) > 0


@pytest.mark.usefixtures("one_or_two_threads")
@pytest.mark.parametrize("seed", range(4))
def test_single_rows_of_all_sizes(seed: int) -> None:
    """Columns and depths that fill groups and lanes and do not, rows that begin anywhere, numbers of all kinds."""
    torch.manual_seed(seed)
    pick = random.Random(seed)
    for _ in range(40):
        depth = pick.choice([pick.randint(8, 40), pick.randint(41, 400), pick.randint(401, 1200), 192, 768])
        columns = pick.choice([pick.randint(32, 70), pick.randint(71, 300), pick.randint(301, 1100), 128, 256, 257])
        b, start = matrix(depth, columns, pick.random() < 0.5), pick.choice([0, 0, 1, 2, 3, 5])
        row = torch.randn(1, depth + 8)
        if pick.random() < 0.4:
            row = row * (torch.rand_like(row) < 0.7)
            b = b.where(torch.rand_like(b) > 0.01, pick.choice([float("inf"), float("nan"), -0.0, 1e-42]))
        ran(lambda x, b, start=start, depth=depth: x[:, start : start + depth] @ b, row, b)
        ran(torch.addmm, pick.choice([torch.randn(columns), torch.full((columns,), -0.0)]), row[:, :depth], b)


@pytest.mark.usefixtures("one_or_two_threads")
@pytest.mark.parametrize("seed", range(4))
def test_few_rows(seed: int) -> None:
    """Some of them may be given to each thread by BLAS, whose bits are others then."""
    torch.manual_seed(seed)
    pick = random.Random(seed)
    for _ in range(40):
        rows, columns = pick.randint(2, 17), pick.choice([pick.randint(2, 40), 48, 64, 65, 128, 257])
        a = matrix(rows, pick.choice([8, 16, 31, 64, 128, 193, 400]), True)
        b = matrix(a.shape[1], columns, pick.random() < 0.5)
        ran(torch.mm, a, b, times=4)
        ran(torch.addmm, torch.randn(columns), a, b, times=4)


@pytest.mark.usefixtures("one_or_two_threads")
@pytest.mark.parametrize("seed", range(4))
def test_columns_vectors_and_several_rows(seed: int) -> None:
    """Of several products BLAS adds up in another order than of one, where the stride of a single row says so. Where a
    matrix begins in memory matters too."""
    torch.manual_seed(seed)
    pick = random.Random(seed)
    for _ in range(25):
        batch, depth = (
            pick.choice([1, 2, 3, 7]),
            pick.choice([pick.randint(8, 60), 64, 102, 256, pick.randint(300, 600)]),
        )
        length = pick.choice([pick.randint(32, 70), 64, 128, pick.randint(100, 400)])
        start, by_rows = pick.choice([0, 0, 4, 1, 2, 3]), pick.random() < 0.5
        sizes = (batch, length, depth) if by_rows else (batch, depth, length)
        memory, x = torch.randn(batch * length * depth + 4), torch.randn(batch, depth)
        if pick.random() < 0.3:
            memory = memory.where(
                torch.rand_like(memory) > 0.01, pick.choice([float("inf"), float("nan"), -0.0, 1e-42])
            )

        def matrices(memory: torch.Tensor, start=start, sizes=sizes, by_rows=by_rows) -> torch.Tensor:
            laid = memory[start : start + sizes[0] * sizes[1] * sizes[2]].view(sizes)
            return laid if by_rows else laid.mT

        for stride in (1, depth, pick.choice([0, 3])):
            column, row = ((batch, depth, 1), (depth, 1, stride)), ((batch, 1, depth), (depth, stride, 1))
            ran(lambda m, x, of=column: torch.bmm(matrices(m), x.as_strided(*of)), memory, x)
            ran(lambda m, x, of=row: torch.bmm(x.as_strided(*of), matrices(m).mT), memory, x)
        ran(lambda m, x: torch.mm(matrices(m)[0], x[:1].t()), memory, x)
        ran(lambda m, x: torch.mv(matrices(m)[0], x[0]), memory, x)
        ran(lambda m, x: torch.mm(x[:1], matrices(m)[0].t()), memory, x)
        ran(lambda m, x: torch.addmm(x[0, :1], matrices(m)[0], x[:1].t()), memory, x)
        ran(lambda m, x, n=length: torch.addmm(m[:n, None], matrices(m)[0], x[:1].t()), memory, x)
        ran(lambda m, x: torch.bmm(matrices(m)[:1].expand(3, -1, -1), x[:1].expand(3, -1).unsqueeze(2)), memory, x)


def test_products_by_columns_are_used() -> None:
    if not is_used(1, 512, 1024):
        pytest.skip("BLAS adds the sums of a row up in another order here")
    several, one = torch.randn(3, 512, 256), torch.randn(512, 256)
    assert ran(lambda a, x: torch.bmm(a, x.unsqueeze(2)), several, torch.randn(3, 256)) > 0
    assert ran(lambda a, x: torch.bmm(x.unsqueeze(1), a), several, torch.randn(3, 512)) > 0
    assert ran(lambda a, x: torch.bmm(x.unsqueeze(1), a.mT), several, torch.randn(3, 256)) > 0
    assert ran(torch.mv, one, torch.randn(256)) > 0
    assert ran(torch.mm, one, torch.randn(256, 1)) > 0


def test_rows_that_are_ATens_affair(two_threads: None) -> None:
    assert ran(torch.bmm, torch.randn(2, 1, 8), torch.randn(2, 8, 48)) == 0
    assert ran(torch.mm, torch.randn(1, 1 << 15), torch.randn(1 << 15, 64)) == 0
    assert ran(torch.mm, torch.randn(1, 512), torch.randn(512, 31)) == 0


def test_alpha_and_beta_are_ATens_affair() -> None:
    a, b, c = torch.randn(32, 64), torch.randn(64, 32), torch.randn(32)
    assert ran(lambda a, b, c: torch.addmm(c, a, b, beta=0.5), a, b, c) == 0
    assert ran(lambda a, b, c: torch.addmm(c, a, b, alpha=2), a, b, c) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_other_types_are_ATens_affair(dtype: torch.dtype) -> None:
    a = torch.randn(32, 32).to(dtype)
    before = gemm.count()
    for _ in range(3):
        assert torch.equal((a.to(DEVICE) @ a.to(DEVICE)).cpu(), a @ a)
    assert gemm.count() == before


def test_conjugate_and_negative_views_are_not_resolved() -> None:
    """BLAS multiplies by a conjugate as such, which rounds elsewhere than a product with its copy."""
    for rows, depth, columns in 8 * [(1, 7, 1), (5, 3, 1), (1, 4, 6)]:
        a, b = (torch.randn(size, depth, dtype=torch.complex64) for size in (rows, columns))
        for function in (
            lambda a, b: torch.view_as_real(a.conj() @ b.mT),
            lambda a, b: torch.view_as_real(a @ b.mH),
            lambda a, b: torch.view_as_real(torch.addmm(b[:, 0], a.conj(), b.mH)),
            lambda a, b: a.real @ b.conj().imag.mT,
        ):
            wanted = function(a, b)
            for _ in range(3):
                assert torch.equal(function(a.to(DEVICE), b.to(DEVICE)).cpu(), wanted)


def test_a_wrong_order_of_summation_is_noticed() -> None:
    """Were BLAS to add up in another order than was found out, its kernel would be used."""
    gemm.configure(also_slower=True, share=1.0, uses=0, work=0.0, block=24)
    assert ran(lambda a, b: a @ b, torch.randn(64, 100), torch.randn(100, 64)) == 0
    assert ran(lambda a, b, c: torch.addmm(c, a, b), torch.randn(64, 100), torch.randn(100, 64), torch.randn(64)) == 0


def test_rounded_factors_are_ATens_affair() -> None:
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert ran(lambda a, b: a @ b, a, b) == 0
    finally:
        torch.set_float32_matmul_precision(before)
    with torch.backends.mkldnn.flags(enabled=False):
        assert ran(lambda a, b: a @ b, a, b) == 0


def test_it_can_be_switched_off() -> None:
    marid.settings.fast_products = False
    try:
        assert ran(lambda a, b: a @ b, torch.randn(64, 64), torch.randn(64, 64)) == 0
    finally:
        marid.settings.fast_products = True


def test_few_products_are_not_worth_a_trial() -> None:
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    a, b = torch.randn(64, 64), torch.randn(64, 64)
    used = ran(product, a, b) > 0  # and no new program any more
    gemm.configure(also_slower=True, share=1.0, uses=3, work=0.0)
    assert ran(product, a, b, times=3) == 0
    assert ran(product, a, b, times=3) == 2 * used
    gemm.configure(also_slower=True, share=1.0, uses=0, work=3.5 * 2 * 64**3)
    assert ran(product, a, b, times=4) == 0
    assert ran(product, a, b, times=3) == 2 * used


def test_a_training_step_is_bitwise_equal() -> None:
    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(300, 128), torch.nn.GELU(), torch.nn.Linear(128, 32)).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        x, y = torch.randn(64, 300).to(device), torch.randint(0, 32, (64,)).to(device)
        seen = []
        for _ in range(20):
            loss = torch.nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    wanted = losses("cpu")
    before = gemm.count()
    assert losses(DEVICE) == wanted
    assert gemm.count() > before or not is_used()


@pytest.mark.parametrize("function", [torch.mm, torch.nn.functional.linear, lambda a, b: torch.addmm(a[0], a, b)])
def test_products_that_run_at_once(at_once: None, function: Callable[..., torch.Tensor]) -> None:
    if not is_used():
        pytest.skip("BLAS adds sums up in an order that the kernel cannot follow")
    before = marid.stats().ops_immediate
    assert ran(function, torch.randn(64, 64), torch.randn(64, 64)) > 0
    assert marid.stats().ops_immediate > before


@pytest.mark.parametrize("function", [torch.mm, torch.bmm, lambda a, b: torch.addmm(torch.ones(()), a, b)])
@pytest.mark.parametrize("dims", [1, 2, 3, 4])
@pytest.mark.parametrize("immediate", [False, True])
def test_matrices_of_other_dimensions(
    function: Callable[..., torch.Tensor], dims: int, immediate: bool, request: pytest.FixtureRequest
) -> None:
    """They raise what they raise on the CPU, whichever kernel there is for those that fit."""
    if immediate:
        request.getfixturevalue("at_once")
    given = torch.randn([2] * (dims - 2) + [64] * min(dims, 2))

    def result(device: str) -> object:
        try:
            return function(given.to(device), given.to(device)).shape
        except RuntimeError as error:
            return str(error).splitlines()[0]

    assert [result(DEVICE) for _ in range(3)] == [result("cpu")] * 3
