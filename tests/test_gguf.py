"""GGUF files: what is in them, packed matrices and what they can do, and files that are damaged or hostile."""

from __future__ import annotations

import random
import struct
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import marid
from marid.frontend import quantized, quantized_operators
from marid.frontend.quantized import QuantizedTensor
from marid.frontend.quantized_operators import PACKINGS
from marid.models.rwkv7_files import load
from marid.native import gemm
from marid.remote.worker.operators import operator_named
from tests.gguf_files import random_blocks, write_model
from tests.helpers import DEVICE, assert_same
from tests.test_rwkv7 import random_model

gguf = pytest.importorskip("gguf")
ops = torch.ops.marid

ROWS, DEPTH = 70, 512


def elements_of(packed: torch.Tensor, packing: str) -> torch.Tensor:
    """As the ``gguf`` package has them."""
    return torch.from_numpy(gguf.quants.dequantize(packed.numpy(), gguf.GGMLQuantizationType[packing]))


@pytest.fixture(params=[True, False], ids=["bytes", "words"])
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Products in integers by each of the instructions that this machine may have for them."""
    gemm.configure(bytes_too=request.param)
    yield
    gemm.configure()


def write(path: Path, metadata: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """A file with a tensor of every kind; their elements."""
    writer = gguf.GGUFWriter(path, "test")
    for name, value in (metadata or {}).items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    writer.add_array("words", ["a", "ü", ""])
    writer.add_array("numbers", [1, 2, 3])
    found = {}
    for dtype in (torch.float32, torch.float16):
        found[str(dtype)] = torch.randn(3, 4, 5).to(dtype)
        writer.add_tensor(str(dtype), found[str(dtype)].numpy())
    found["bf16"] = torch.randn(8, 4).bfloat16()
    kind = gguf.GGMLQuantizationType.BF16
    writer.add_tensor("bf16", found["bf16"].view(torch.int16).numpy().view("uint8"), raw_dtype=kind)
    for packing in PACKINGS:
        packed = random_blocks(ROWS, DEPTH, packing)
        found[packing] = elements_of(packed, packing)
        writer.add_tensor(packing, packed.numpy(), raw_dtype=gguf.GGMLQuantizationType[packing])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_a_file(tmp_path: Path, device: str) -> None:
    """Metadata, plain tensors with their types, packed matrices that take no more memory than in the file."""
    expected = write(tmp_path / "test.gguf", {"a.number": 7, "a.text": "seven"})
    found = marid.load_file(tmp_path / "test.gguf", device)
    assert found.metadata["general.architecture"] == "test"
    assert (found.metadata["a.number"], found.metadata["a.text"]) == (7, "seven")
    assert (found.metadata["words"], found.metadata["numbers"]) == (["a", "ü", ""], [1, 2, 3])
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        one = found[name]
        assert one.device.type == device
        if name in PACKINGS:
            assert isinstance(one, QuantizedTensor)
            assert one.packed_bytes == ROWS * DEPTH // PACKINGS[name][0] * PACKINGS[name][1]
            assert torch.equal(one.dequantize().cpu(), tensor)
        else:
            assert_same(one, tensor)


@pytest.mark.parametrize("packing", PACKINGS)
def test_elements_are_those_of_the_gguf_package(packing: str) -> None:
    """Bit for bit, with the C++ half and without."""
    packed = random_blocks(33, 1024, packing, seed=1)
    expected = elements_of(packed, packing)
    assert torch.equal(ops.dequantize(packed, packing), expected)
    assert torch.equal(quantized_operators.dequantize(packed, packing), expected)
    assert torch.equal(ops.dequantize(packed.to(DEVICE), packing).cpu(), expected)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 7, 12, 40])
@pytest.mark.parametrize("packing", PACKINGS)
def test_products(packing: str, rows: int, dtype: torch.dtype) -> None:
    """However many rows: those of the elements, and on the device those of the CPU."""
    torch.manual_seed(0)
    packed = random_blocks(ROWS, DEPTH, packing)
    weight = elements_of(packed, packing) / 50
    x, bias = torch.randn(2, rows, DEPTH)[0].to(dtype), torch.randn(ROWS).to(dtype)
    expected = F.linear(x.double(), weight.double() * 50, bias.double())
    found = ops.quantized_linear(x, packed, bias, packing)
    if dtype is torch.float32 and rows:  # few rows are rounded to 16 bits, 32 elements at a time
        bound = F.linear(x.double().abs(), weight.double().abs() * 50)
        assert ((found - expected).abs() <= 2e-5 * bound + 1e-5).all()
    close = {"rtol": 1e-2, "atol": 1e-1} if dtype is torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-1}
    torch.testing.assert_close(found, expected.to(dtype), **close)
    plain = quantized_operators.quantized_linear(x, packed, bias, packing)
    torch.testing.assert_close(found, plain, **close)
    lazy = ops.quantized_linear(x.to(DEVICE), packed.to(DEVICE), bias.to(DEVICE), packing)
    assert lazy.operation == "marid::quantized_linear"
    assert_same(lazy, found)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("packing", PACKINGS)
def test_products_of_rows_of_all_sizes(packing: str) -> None:
    """Zeros, very small and very large elements, and one that is far larger than those beside it."""
    torch.manual_seed(0)
    packed = random_blocks(ROWS, DEPTH, packing)
    weight = elements_of(packed, packing).double()
    x = torch.randn(1, DEPTH)
    x[0, :32] = 0
    x[0, 32:64] *= 1e-40
    x[0, 64:96] *= 1e30
    x[0, 96:128] *= 1e-30
    x[0, 130] = 1e4
    found = ops.quantized_linear(x, packed, None, packing)
    bound = 2e-5 * F.linear(torch.full_like(x, 1e30).double(), weight.abs())
    assert ((found - F.linear(x.double(), weight)).abs() <= bound).all()
    x[0, 64:96] = 0
    found = ops.quantized_linear(x, packed, None, packing)
    around = torch.cat([part.abs().amax().expand(32) for part in x[0].split(32)])[None]
    assert ((found - F.linear(x.double(), weight)).abs() <= 2e-5 * F.linear(around.double(), weight.abs())).all()


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("packing", PACKINGS)
def test_products_of_numbers_that_are_not_finite(packing: str, number: float) -> None:
    """They are those of the elements."""
    packed = random_blocks(ROWS, DEPTH, packing)
    x = torch.randn(3, DEPTH)
    x[1, 70] = number
    found = ops.quantized_linear(x, packed, None, packing)
    expected = F.linear(x, elements_of(packed, packing))
    assert torch.equal(found.isfinite(), expected.isfinite())
    assert found[::2].isfinite().all()
    assert torch.equal(found[1].isnan(), expected[1].isnan())
    assert torch.equal(found[1].sign().nan_to_num(), expected[1].sign().nan_to_num())


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_what_a_packed_matrix_can_do(device: str) -> None:
    """Products and rows without unpacking it; the rest is right, and says once that it was unpacked."""
    packed = random_blocks(ROWS, DEPTH, "Q8_0").to(device)
    weight = QuantizedTensor(packed, "Q8_0")
    plain, x, index = weight.dequantize(), torch.randn(3, DEPTH).to(device), torch.tensor([[1, 3], [5, 7]]).to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for found, expected in (
            (F.linear(x, weight), F.linear(x, plain)),
            (x @ weight.t(), x @ plain.t()),
            (torch.matmul(x, weight.T), x @ plain.t()),
            (x @ weight.transpose(0, 1), x @ plain.t()),
            (ops.linear_activation(x, weight, None, "relu"), F.linear(x, plain).relu()),
            (ops.fast_linear(x, weight), F.linear(x, plain)),
            (F.embedding(index, weight), F.embedding(index, plain)),
        ):
            torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=1e-4, atol=1e-2)
        layer = torch.nn.Linear(DEPTH, ROWS, bias=False)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        assert isinstance(layer.weight, QuantizedTensor)
        torch.testing.assert_close(layer(x).cpu(), F.linear(x, plain).cpu(), rtol=1e-4, atol=1e-2)
        assert isinstance(weight.to(torch.float32), QuantizedTensor)
        assert torch.equal(weight.cpu().dequantize(), plain.cpu())
        assert (weight.shape, weight.dtype, weight.device) == (plain.shape, plain.dtype, plain.device)
        assert repr(weight).startswith("QuantizedTensor(Q8_0")
    quantized._said.clear()
    with pytest.warns(UserWarning, match=r"add has no form for packed matrices.* of Q8_0"):
        total = torch.add(weight, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.add(weight, 1)
    assert torch.equal(total.cpu(), (plain + 1).cpu())
    with pytest.warns(UserWarning, match=r"has no form for packed"):
        assert torch.equal(weight[3:5].cpu(), plain[3:5].cpu())


def test_gradients_go_through_a_packed_matrix() -> None:
    packed = random_blocks(ROWS, DEPTH, "Q4_K")
    x = torch.randn(5, DEPTH, requires_grad=True)
    F.linear(x, QuantizedTensor(packed, "Q4_K")).sum().backward()
    torch.testing.assert_close(x.grad, elements_of(packed, "Q4_K").sum(0).expand(5, DEPTH), rtol=1e-4, atol=1e-3)


def test_misuse() -> None:
    packed, x = random_blocks(4, 256, "Q4_K"), torch.randn(2, 256)
    for wrong in (
        lambda: ops.dequantize(packed[:, :-1], "Q4_K"),
        lambda: ops.dequantize(packed.int(), "Q4_K"),
        lambda: ops.quantized_linear(x[:, :32], packed, None, "Q4_K"),
        lambda: ops.quantized_linear(x, packed[0], None, "Q4_K"),
        lambda: ops.quantized_linear(x.int(), packed, None, "Q4_K"),
        lambda: ops.quantized_linear(x, packed, torch.randn(5), "Q4_K"),
    ):
        with pytest.raises(RuntimeError):
            wrong()
    with pytest.raises(ValueError, match="does not know the packing 'Q2_K'"):
        ops.dequantize(packed, "Q2_K")
    for name in quantized_operators.NAMES:
        assert operator_named(f"marid.{name}.default").func._schema.name == f"marid::{name}"


@pytest.mark.parametrize("packing", [None, "Q8_0", "Q4_0"])
def test_a_model(tmp_path: Path, packing: str | None) -> None:
    """RWKV-7 from a GGUF file is the model that was written, with elements as they are packed."""
    model = random_model()
    write_model(tmp_path / "model.gguf", model, packing)
    tokens = torch.randint(300, (1, 30))
    for name, parameter in model.named_parameters():
        if (
            packing is not None
            and parameter.dim() == 2
            and name.split(".")[-1] in (*("weight", "receptance", "key", "value", "output"),)
        ):
            kind = gguf.GGMLQuantizationType[packing]
            blocks = gguf.quants.quantize(parameter.detach().numpy(), kind)
            parameter.data = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    with torch.inference_mode():
        expected, _ = model(tokens)
        for device in ("cpu", DEVICE):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                read = load(tmp_path / "model.gguf", device)
                logits, state = read.prefill(tokens.to(device))
                torch.testing.assert_close(logits.cpu(), expected[:, -1], rtol=1e-3, atol=1e-3)
                logits, _ = read(tokens[:, :1].to(device), state)
                logits.cpu()
            assert replace(read.config, norm_eps=model.config.norm_eps) == model.config
            assert read.config.norm_eps == pytest.approx(model.config.norm_eps)
            assert isinstance(read.head.weight, QuantizedTensor) is (packing is not None)


def test_a_function_of_packed_weights_is_replayed() -> None:
    """``marid.compile`` finds what packed matrices are made of."""
    layer = torch.nn.Linear(DEPTH, ROWS, bias=False)
    layer.weight = torch.nn.Parameter(QuantizedTensor(random_blocks(ROWS, DEPTH, "Q8_0").to(DEVICE), "Q8_0"), False)
    x = torch.randn(1, DEPTH).to(DEVICE)
    step = marid.compile(lambda x: layer(x).relu())
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = layer(x).relu().cpu()
        for _ in range(6):
            assert_same(step(x), expected)
    (functions,) = [one for one in marid.stats().functions if one.replays]
    assert functions.plain == 0


def test_packed_weights_stay_packed_on_a_worker(tmp_path: Path) -> None:
    model = random_model()
    write_model(tmp_path / "model.gguf", model, "Q8_0")
    with torch.inference_mode():
        expected, _ = load(tmp_path / "model.gguf").prefill(torch.arange(9)[None])

    def there(device: str) -> None:
        with torch.inference_mode(), marid.budget(bytes_up=1_000_000):  # elements take 2 MB
            logits, _ = load(tmp_path / "model.gguf", device).prefill(torch.arange(9, device=device)[None])
            torch.testing.assert_close(logits.cpu(), expected, rtol=1e-4, atol=1e-4)

    marid.connect(workers=1, first=5)
    there(f"{DEVICE}:5")
    marid.disconnect(5)


# --- damaged and hostile files ---------------------------------------------------------------------------------------


def _refused(path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        marid.load_file(path, "cpu")
    assert str(path) in str(caught.value)
    return str(caught.value)


def _field(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def _tensor(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    head = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("fields", "tensors", "counts"),
    [
        ([], [], (1 << 60, 0)),
        ([], [], (0, 1 << 60)),
        ([_field(b"a", 9, struct.pack("<IQ", 4, 1 << 60))], [], None),
        ([_field(b"a", 9, struct.pack("<IQ", 0, 1 << 40))], [], None),
        ([_field(b"a", 8, struct.pack("<Q", 1 << 63))], [], None),
        ([_field(b"a", 99, b"")], [], None),
        ([_field(b"a", 9, struct.pack("<IQ", 9, 1) * 5000)], [], None),
        ([_field(b"a", 4, b"\0\0\0\0")] * 2, [], None),
        ([_field(b"\xff\xfe", 4, b"\0\0\0\0")], [], None),
        ([_field(b"general.alignment", 4, b"\0\0\0\0")], [], None),
        ([], [_tensor(b"t", (1 << 40,), 0, 0)], None),
        ([], [_tensor(b"t", (1 << 32, 1 << 32), 0, 0)], None),
        ([], [_tensor(b"t", (1 << 32, 1 << 31), 0, 0)], None),
        ([], [_tensor(b"t", (4,), 0, 1 << 62)], None),
        ([], [_tensor(b"t", (4,), 0, (1 << 64) - 64)], None),
        ([], [_tensor(b"t", (33,), 8, 0)], None),
        ([], [_tensor(b"t", (4,), 77, 0)], None),
        ([], [_tensor(b"t", (4,), 10, 0)], None),
        ([], [_tensor(b"t", (1,) * 50, 0, 0)], None),
        ([], [_tensor(b"t", (4,), 0, 0)] * 2, None),
    ],
)
def test_hostile_files(
    tmp_path: Path, fields: list[bytes], tensors: list[bytes], counts: tuple[int, int] | None
) -> None:
    """Lengths that are not there, overflow or repeat are errors, at once and without memory for them."""
    count = counts or (len(tensors), len(fields))
    data = b"GGUF" + struct.pack("<IQQ", 3, *count) + b"".join(fields) + b"".join(tensors) + bytes(256)
    (tmp_path / "hostile.gguf").write_bytes(data)
    _refused(tmp_path / "hostile.gguf")


def test_what_is_no_gguf(tmp_path: Path) -> None:
    for data in (b"", b"GGUF", b"GGUF" + struct.pack("<I", 77), b"x" * 100, struct.pack(">4sIQQ", b"GGUF", 3, 0, 0)):
        (tmp_path / "no.gguf").write_bytes(data)
        if data[4:] != struct.pack(">IQQ", 3, 0, 0):  # which is an empty file of another machine
            _refused(tmp_path / "no.gguf")
    with pytest.raises(FileNotFoundError):
        marid.load_file(tmp_path / "missing.gguf", "cpu")
    write(tmp_path / "other.gguf")
    with pytest.raises(ValueError, match="no RWKV-7, but 'test'"):
        load(tmp_path / "other.gguf")


def test_damaged_files(tmp_path: Path) -> None:
    """Whatever is cut off or changed: a ``ValueError``, or tensors that lie within the file."""
    model = random_model()
    write(tmp_path / "a.gguf", {"x": 1.5, "y": [1, 2]})
    write_model(tmp_path / "b.gguf", model, "Q8_0", [b"a", b"b"])
    source = random.Random(0)
    for name in ("a.gguf", "b.gguf"):
        whole = (tmp_path / name).read_bytes()
        header = min(len(whole), 6000)
        for _ in range(400):
            data = bytearray(whole)
            if source.random() < 0.3:
                del data[source.randrange(len(data)) if source.random() < 0.5 else source.randrange(header) :]
            for _ in range(source.choice([0, 1, 1, 2, 8])):
                if len(data) > 8:
                    place = source.randrange(8, min(len(data), header))
                    data[place] = source.choice([0, 1, 255, 128, source.randrange(256)])
            (tmp_path / "damaged.gguf").write_bytes(data)
            try:
                found = marid.load_file(tmp_path / "damaged.gguf", "cpu")
            except ValueError:
                continue
            total = sum(t.packed_bytes if isinstance(t, QuantizedTensor) else t.nbytes for t in found.values())
            assert total <= len(data) * len(found)
            try:
                load(tmp_path / "damaged.gguf")
            except ValueError:
                continue
