"""Messages, tensors, programs and requests as bytes: what is sent arrives, and what does not fit is refused."""

from __future__ import annotations

import math
import random
import resource
import struct
import tracemalloc
import weakref
import zlib
from typing import Any

import msgpack
import pytest
import torch

from marid.engine import plain
from marid.engine.plain import spec_from, spec_of, spec_to
from marid.errors import WireError
from marid.execute.accelerator import Host
from marid.frontend import handles
from marid.graph.node import Draw
from marid.graph.program import bind
from marid.remote.wire import codec as wire
from marid.remote.wire import kernel_settings
from marid.remote.wire import requests as ask
from marid.remote.wire.fields import Handle
from marid.remote.wire.kernel_settings import KernelSettings
from marid.remote.wire.program_records import BODY_BYTES, body_of, digest_of, geometry_of, packed, unpacked
from marid.remote.wire.requests import read_requests
from marid.remote.wire.tensors import CHUNK_BYTES, chunks_of, matches, memory_of, packing_of, tensor_of
from marid.remote.worker.chunk_store import ChunkStore
from marid.remote.worker.operators import operator_named
from marid.remote.worker.program_reader import RemoteProgram, geometry_from
from tests.helpers import DEVICE

CPU = torch.device("cpu")
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.complex32, torch.complex64, torch.complex128),
]


# --- headers ---------------------------------------------------------------------------------------------------------


def test_a_header_comes_back_as_it_was() -> None:
    header = {"v": wire.VERSION, "kind": "work", "requests": [["run", b"\0" * 32, [1, 2], [1.5, True, None]]], "seq": 7}
    assert wire.decode(wire.encode(header)) == header


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc1", id="no msgpack"),
        pytest.param(msgpack.packb([1]), id="no map"),
        pytest.param(msgpack.packb({"v": wire.VERSION + 1}), id="another version"),
        pytest.param(msgpack.packb({"v": True}), id="a boolean as version"),
        pytest.param(msgpack.packb({}), id="no version"),
        pytest.param(msgpack.packb({1: 2, "v": wire.VERSION}), id="a number as key"),
        pytest.param(msgpack.packb({"v": wire.VERSION, "x": msgpack.ExtType(5, b"abc")}), id="an extension"),
        pytest.param(msgpack.packb({"v": wire.VERSION, "x": msgpack.Timestamp(1)}), id="a timestamp"),
        pytest.param(msgpack.packb({"v": wire.VERSION}) + b"x", id="more behind it"),
        pytest.param(b"\x82\xa1v\x02\xa1x" + b"\x91" * 2000 + b"\x01", id="nested too deep"),
        pytest.param(b"\x82\xa1v\x02\xa1x" + b"\x91" * 40 + b"\x01", id="nested a little too deep"),
        pytest.param(b"\x82\xa1v\x02\xa1x" + b"\xdd\xff\xff\xff\xff", id="a list that claims four billion items"),
        pytest.param(b"\x82\xa1v\x02\xa1x" + b"\xc6\xff\xff\xff\xff", id="bytes that claim four billion"),
        pytest.param(b"\x82\xa1v\x02\xa1x" + b"\xdf\xff\xff\xff\xff", id="a map that claims four billion items"),
        pytest.param(b"\x82\xa1v\x02\xa1x\xa2\xff\xfe", id="a text that is no UTF-8"),
        pytest.param(msgpack.packb({"v": wire.VERSION, "x": [0] * 70_000}), id="a list that is too long"),
        pytest.param(msgpack.packb({"v": wire.VERSION, "x": b"0" * wire.HEADER_BYTES}), id="too long"),
    ],
)
def test_what_is_no_header_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode(data)


def test_lengths_that_are_claimed_take_no_memory() -> None:
    """Lists in lists, each claiming as much as may be: little is taken for them, and all of it is given back."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bomb = b"\x82\xa1v\x02\xa1x" + b"\xdd\x00\x00\x3f\xff" * 30_000
    for _ in range(50):
        with pytest.raises(WireError):
            wire.decode(bomb)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB


def test_bodies_travel_compressed() -> None:
    body = wire.pack_plain([["aten.add.Tensor"], list(range(500)), [1, 2], [[0, [1, 2], [], [3, []]]] * 300])
    assert unpacked(packed(body)) == unpacked(memoryview(packed(body))) == body
    assert 4 * len(packed(body)) < len(body)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "too early"),
        (b"no zlib at all", "decompressed"),
        (zlib.compress(b"body")[:-1], "too early"),
        (zlib.compress(b"body") + b"x", "behind"),
        (zlib.compress(b"body")[:-1] + b"x", "decompressed"),
        (zlib.compress(b"\0" * (BODY_BYTES + 1)), "more than"),
    ],
)
def test_what_is_no_body_is_refused(data: bytes, what: str) -> None:
    with pytest.raises(WireError, match=what):
        unpacked(data)


def test_a_small_body_that_would_be_a_large_one_takes_no_memory() -> None:
    inflated = zlib.compressobj(9)
    bomb = b"".join([inflated.compress(bytes(1 << 20)) for _ in range(1 << 10)]) + inflated.flush()
    tracemalloc.start()
    try:
        for _ in range(3):
            with pytest.raises(WireError, match="more than"):
                unpacked(bomb)
        assert tracemalloc.get_traced_memory()[1] < 3 * BODY_BYTES
    finally:
        tracemalloc.stop()


def test_a_header_that_cannot_be_sent_is_said() -> None:
    with pytest.raises(WireError, match="longer than"):
        wire.encode({"v": 1, "x": b"0" * wire.HEADER_BYTES})
    with pytest.raises(WireError, match="cannot be sent"):
        wire.encode({"v": 1, "x": object()})
    with pytest.raises(WireError, match="cannot be sent"):
        wire.encode({"v": 1, "x": 1 << 70})


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number",
    [0, -1, (1 << 63) - 1, -(1 << 63), 0.0, -0.0, 0.1, 1e308, math.inf, -math.inf, math.nan, True, False]
    + [complex(-0.0, math.inf), (1, 2, 3), (), (0.5, 1), (True, False)],
)
def test_numbers_keep_type_and_bits(number: Any) -> None:
    arrived = plain.number_from(wire.unpack_plain(wire.pack_plain(plain.number_to(number)), 100))
    assert type(arrived) is type(number)
    assert repr(arrived) == repr(number)
    if type(number) is float:
        assert struct.pack("d", arrived) == struct.pack("d", number)


def test_a_random_position_arrives() -> None:
    draw = Draw((1 << 64) - 1, 12, 8, 16, -1)
    arrived = plain.number_from(plain.number_to(draw))
    assert [getattr(arrived, name) for name in Draw.__slots__] == [getattr(draw, name) for name in Draw.__slots__]


@pytest.mark.parametrize(
    "data",
    [None, "1", b"1", [[1]], [None], ["1"], {"c": [1.0]}, {"c": [1, 2]}, {"c": 1.0}, {"d": [1] * 4}, {"x": 1}, {}]
    + [{"d": [-1, 0, 0, 0, 0]}, {"d": [1 << 64, 0, 0, 0, 0]}, {"d": [0, 0, -2, 0, 0]}, {"d": [0.5, 0, 0, 0, 0]}]
    + [[0] * 5000],
)
def test_what_is_no_number_is_refused(data: Any) -> None:
    with pytest.raises(WireError):
        plain.number_from(data)


# --- tensors ---------------------------------------------------------------------------------------------------------


def _filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count: int = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8).view(dtype).view(shape)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))


def _sent(tensor: torch.Tensor) -> torch.Tensor:
    packing = packing_of(tensor.shape, tensor.stride(), tensor.dtype)
    data = bytes(memory_of(packing.pack(tensor)))
    assert len(data) == packing.nbytes
    dtype = plain.dtype_named(plain.dtype_name(tensor.dtype))
    return tensor_of([data[:5], data[5:]], packing_of(tensor.shape, tensor.stride(), dtype), dtype, Host())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda t: t, id="as it is"),
        pytest.param(lambda t: t.t(), id="transposed"),
        pytest.param(lambda t: t[:, 2], id="a column"),
        pytest.param(lambda t: t[1::2, ::3], id="every other"),
        pytest.param(lambda t: t[0, 0], id="one element"),
        pytest.param(lambda t: t[:0], id="none"),
        pytest.param(lambda t: t[3].expand(5, 7), id="expanded"),
        pytest.param(lambda t: t[:, :1].expand(6, 9), id="expanded with gaps"),
    ],
)
def test_tensors_arrive_bit_for_bit(dtype: torch.dtype, view: Any) -> None:
    tensor = view(_filled((6, 7), dtype))
    arrived = _sent(tensor)
    assert arrived.shape == tensor.shape
    assert arrived.stride() == tensor.stride()
    assert arrived.dtype == tensor.dtype
    assert _same_bits(arrived, tensor)


def test_only_elements_are_sent() -> None:
    tensor = torch.randn(1000, 1000)
    assert packing_of((1000,), tensor[:, 3].stride(), torch.float32).nbytes == 4000
    assert packing_of((1000, 1000), (0, 0), torch.float32).nbytes == 4
    assert packing_of((3, 3), (1, 1), torch.float32).nbytes == 5 * 4  # strides that overlap: all of the memory
    assert packing_of((0, 5), (5, 1), torch.float32).nbytes == 0


def test_any_strides_arrive() -> None:
    """Random strides, overlapping or not, over random memory."""
    choose = random.Random(3)
    for _ in range(500):
        rank = choose.randint(0, 4)
        shape = tuple(choose.randint(0, 4) for _ in range(rank))
        stride = tuple(choose.choice([0, 1, 2, 3, 5, 8, 20]) for _ in range(rank))
        tensor = torch.randn(400).as_strided(shape, stride, choose.randint(0, 9))
        arrived = _sent(tensor)
        assert arrived.stride() == tensor.stride()
        assert torch.equal(arrived, tensor)


@pytest.mark.parametrize("name", [None, "", "int4", "qint8", "float32 ", 5, ["float32"]])
def test_dtypes_that_are_none_are_refused(name: Any) -> None:
    with pytest.raises(WireError):
        plain.dtype_named(name)


def test_bytes_that_do_not_fit_are_refused() -> None:
    for pieces in ([b"\0" * 23], [b"\0" * 25], [b"\0" * 20, b"\0" * 5], []):
        with pytest.raises(WireError):
            tensor_of(pieces, packing_of((2, 3), (3, 1), torch.float32), torch.float32, Host())


# --- specs -----------------------------------------------------------------------------------------------------------


def test_specs_come_back_as_one_object() -> None:
    tensor = torch.randn(4, 5)[1:, ::2]
    spec = spec_of(tensor)
    assert spec_from(spec_to(spec)) is spec
    assert matches(tensor, spec)
    assert not matches(tensor[1:], spec)
    complex_spec = spec_of(torch.randn(3, dtype=torch.complex64).conj())
    assert complex_spec.conj
    assert spec_from(spec_to(complex_spec)) is complex_spec


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        ["float32", [2], [1]],
        ["float32", [2], [1, 1], 0],
        ["float32", [-1], [1], 0],
        ["float32", [2], [-1], 0],
        ["float32", [1 << 50], [1], 0],
        ["float32", [1 << 20, 1 << 20, 1 << 20], [1, 1, 1], 0],
        ["float32", [2], [1 << 45], 0],
        ["float32", [2.0], [1], 0],
        ["float32", [True], [1], 0],
        ["float32", [1] * 65, [1] * 65, 0],
        ["int64", [2], [1], 0, True, False],
        ["float32", [2], [1], -1],
        ["float32", [2], [1], 0, 1, 0],
    ],
)
def test_what_is_no_spec_is_refused(data: Any) -> None:
    with pytest.raises(WireError):
        spec_from(data)


# --- operators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["aten.add.Tensor", "aten.native_batch_norm.default", "marid.linear_activation.default", "aten.resize_.default"]
    + ["aten._foreach_add_.ScalarList", "aten._linalg_check_errors.default", "aten.nonzero.default"],
)
def test_operators_that_are_recorded_are_admitted(name: str) -> None:
    assert str(operator_named(name).func) == name
    assert operator_named(name) is operator_named(name)


@pytest.mark.parametrize(
    "name",
    ["aten.from_file.default", "aten.set_.source_Storage", "aten.nothing.default", "aten.add.nothing", "aten.add"]
    + [
        "os.system.default",
        "prim.device.default",
        "quantized.add.default",
        "aten.__class__.default",
        "aten.add.Tensor ",
    ]
    + ["aten.add.__call__", "aten..default", "c10d.send.default", "inductor._alloc_from_pool.default", "", "a.b.c.d"]
    + [
        "profiler._record_function_enter.default",
        "aten.ADD.Tensor",
        "aten.add.Tensor\n",
        "aten.ädd.Tensor",
        "aten.add.Tensor ",
    ],
)
def test_other_operators_are_refused(name: str) -> None:
    with pytest.raises(WireError):
        operator_named(name)


# --- programs --------------------------------------------------------------------------------------------------------


def _recorded(make: Any) -> Any:
    others = handles.tape(0).pending()  # of tests that were here before
    before = set(map(id, others))
    kept = make()
    task = bind([node for node in handles.tape(0).pending() if id(node) not in before])
    del others
    return kept, task, task.build()


def _work() -> Any:
    x = torch.arange(12.0, device=DEVICE).view(3, 4)
    x[0] += torch.rand(4, device=DEVICE) * 2
    a, b = torch.split(torch.cat([x, x.t().reshape(3, 4)]), 3)
    y = torch.nn.functional.gelu(a, approximate="tanh").to(torch.bfloat16)
    picked = torch._foreach_add([a, b], [1.0, 2.0])
    return y, x[:, [0, 2]], a.clamp(max=3), picked, b.sum(dim=[0, 1], keepdim=True), torch.topk(a, 2)


def test_programs_come_back_as_they_were() -> None:
    kept, task, program = _recorded(_work)
    remote = RemoteProgram.read(body_of(program), CPU)
    assert len(kept) == 6
    assert remote.program.input_slots == program.input_slots
    assert remote.program.output_slots == program.output_slots
    assert remote.program.slot_count == program.slot_count
    for arrived, sent in zip(remote.program.instructions, program.instructions, strict=True):
        assert arrived.op.func is sent.op.func
        assert (arrived.op.mutates, arrived.op.view) == (sent.op.mutates, sent.op.view)
        assert (arrived.args, arrived.kwargs, arrived.results) == (sent.args, sent.kwargs, sent.results)
    remote.check(task.params)
    assert body_of(remote.program) == body_of(program)
    specs = geometry_from(geometry_of(task.specs), remote.program)
    for arrived, sent in zip(specs, task.specs, strict=True):
        assert arrived is not None
        assert sent is not None
        assert (arrived.shape, arrived.stride, arrived.offset) == (sent.shape, sent.stride, sent.offset)
        assert arrived.dtype is sent.dtype


def _body(**changes: Any) -> list[Any]:
    """``relu(x + y)`` of two inputs, as plain data, with other parts."""
    parts: dict[str, Any] = {
        "ops": ["aten.add.Tensor", "aten.relu.default"],
        "inputs": [0, 1],
        "outputs": [3],
        "instructions": [[0, [0, 1], ["alpha", "p"], [2, []]], [1, [2], [], [3, []]]],
    }
    parts |= changes
    return [parts["ops"], parts["inputs"], parts["outputs"], parts["instructions"]]


def _one(*args: Any, op: str = "aten.add.Tensor", named: Any = (), results: Any = (2, [])) -> list[Any]:
    return _body(ops=[op], outputs=[], instructions=[[0, list(args), list(named), list(results)]])


def test_a_body_made_by_hand_is_a_program() -> None:
    program = RemoteProgram.read(wire.pack_plain(_body()), CPU)
    program.check([2])
    assert len(program.program.instructions) == 2


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(None, id="nothing"),
        pytest.param(_body()[:3], id="a part is missing"),
        pytest.param(_body(inputs=[0, 0]), id="an input twice"),
        pytest.param(_body(inputs=[0]), id="an undefined slot"),
        pytest.param(_body(inputs=[0, 1, 9]), id="slots with a gap"),
        pytest.param(_body(inputs=[0, 1 << 40]), id="a slot out of range"),
        pytest.param(_body(inputs=[0, -1]), id="a negative slot"),
        pytest.param(_body(outputs=[7]), id="an undefined output"),
        pytest.param(_body(outputs=[3, 3]), id="an output twice"),
        pytest.param(_body(ops=["aten.from_file.default"] * 2), id="an operator that is not admitted"),
        pytest.param(_body(ops=[]), id="no operators"),
        pytest.param(_body(ops=[5, 6]), id="numbers as operators"),
        pytest.param(_one(0), id="too few arguments"),
        pytest.param(_one(0, 1, 1), id="too many arguments"),
        pytest.param(_one(0, 1, named=["alpha", "p", "alpha", "p"]), id="an argument twice"),
        pytest.param(_one(0, 1, named=["self", 0]), id="an argument by position and by name"),
        pytest.param(_one(0, 1, named=["out", 0]), id="an argument that is not there"),
        pytest.param(_one(0, 1, named=["alpha"]), id="a name without a value"),
        pytest.param(_one(0, 1, named=["alpha", 0]), id="a tensor for a number"),
        pytest.param(_one(0, {"str": "x"}), id="a text for a tensor"),
        pytest.param(_one(0, None), id="None for a tensor"),
        pytest.param(_one(0, "g"), id="a random position for a tensor"),
        pytest.param(_one(0, [1]), id="a list for a tensor"),
        pytest.param(_one(0, 2), id="its own result"),
        pytest.param(_one(0, 1.5), id="a bare number"),
        pytest.param(_one(0, {"x": 1}), id="a map"),
        pytest.param(_one(0, 1, results=[2, [0]]), id="an item of a tensor"),
        pytest.param(_one(0, 1, results=[2, [], 2, []]), id="a result twice"),
        pytest.param(_one(0, 1, results=[1, []]), id="a result in the slot of an input"),
        pytest.param(_one(0, 1, results=[2]), id="a result without a path"),
        pytest.param(_one(0, 0, op="aten.topk.default", results=[2, [0]]), id="a tensor for an integer"),
        pytest.param(_one(0, "p", op="aten.topk.default", results=[2, [2]]), id="a third result of two"),
        pytest.param(_one(0, "p", op="aten.topk.default", results=[2, []]), id="two results as one"),
        pytest.param(_one([0, None], op="aten.cat.default"), id="None in a list of tensors"),
        pytest.param(_one([[0]], op="aten.cat.default"), id="a list in a list"),
        pytest.param(_one(0, {"dtype": "float7"}, op="aten.prims.default"), id="an operator without overload"),
        pytest.param(_one(0, op="aten._to_copy.default", named=["dtype", {"dtype": "float7"}]), id="no dtype"),
        pytest.param(
            _one(0, op="aten._to_copy.default", named=["memory_format", {"memory_format": "other"}]),
            id="no memory format",
        ),
        pytest.param(_one(0, op="aten._to_copy.default", named=["device", {"str": "cuda"}]), id="a device"),
        pytest.param(
            _one(0, 1, named=["rounding_mode", {"str": "x" * 300}], op="aten.div.Tensor_mode"), id="a long text"
        ),
    ],
)
def test_bodies_that_are_no_programs_are_refused(body: Any) -> None:
    with pytest.raises(WireError):
        RemoteProgram.read(wire.pack_plain(body), CPU)


@pytest.mark.parametrize("params", [[], [1, 2], ["1"], [None], [(1,)], [1 << 63], [Draw(0, 0, -1, 0, -1)], [True]])
def test_numbers_that_do_not_fit_are_refused(params: list[Any]) -> None:
    program = RemoteProgram.read(wire.pack_plain(_body()), CPU)
    with pytest.raises(WireError):
        program.check(params)


def test_geometries_that_do_not_fit_are_refused() -> None:
    program = RemoteProgram.read(wire.pack_plain(_body()), CPU).program
    spec = ["float32", [2], [1], 0]
    assert geometry_from(wire.pack_plain([[spec], [0, 0, 0, 0]]), program)[0] is not None
    for data in ([[spec], [0, 0, 0]], [[spec], [0, 0, 0, 1]], [[spec], [-1, 0, 0, 0]], [[], [-1] * 4], [[spec]], None):
        with pytest.raises(WireError):
            geometry_from(wire.pack_plain(data), program)


def test_on_another_device_factories_are_told_where() -> None:
    _, _, program = _recorded(lambda: torch.zeros(3, device=DEVICE) + 1)
    placed = RemoteProgram.read(body_of(program), torch.device("cuda:1")).program
    assert dict(placed.instructions[0].kwargs)["device"].value == torch.device("cuda:1")
    assert not any(name == "device" for name, _ in placed.instructions[1].kwargs)
    assert placed.key != RemoteProgram.read(body_of(program), CPU).program.key


# --- requests --------------------------------------------------------------------------------------------------------


def test_settings_of_kernels_are_those_of_another_process() -> None:
    """All precisions of oneDNN, also those that have no name in ``torch.get_float32_matmul_precision``."""
    before = kernel_settings.current()
    try:
        for operation, value in (("matmul", "bf16"), ("conv", "tf32"), ("rnn", "ieee")):
            torch._C._set_fp32_precision_setter("mkldnn", operation, value)  # pyright: ignore[reportAttributeAccessIssue]
        changed = kernel_settings.current()
        assert (changed.precision, changed.convolutions, changed.recurrent) == ("medium", "tf32", "ieee")
        kernel_settings.apply(before)
        assert kernel_settings.current() == before
        kernel_settings.apply(changed)
        assert kernel_settings.current() == changed
    finally:
        kernel_settings.apply(before)


def test_requests_come_back_as_they_were() -> None:
    digest = digest_of(b"x")
    sent: list[ask.Request] = [
        ask.Upload(1, torch.float32, (2, 3), (3, 1), (b"\1" * 10, b"\2" * 14)),
        ask.Upload(2, torch.uint8, (CHUNK_BYTES + 1,), (1,), (), (digest, digest)),
        ask.Chunk(digest, b"abc"),
        ask.Have((digest,)),
        ask.Program(digest, b"body"),
        ask.Geometry(digest, digest, b"body"),
        ask.Run(digest, digest, (1, 2), (1, 2.5, (3, 4), 1 + 2j), 100),
        ask.Run(digest, digest, (1, 2), (), 100, 3, (1, 2)),
        ask.Again(digest, digest, ((0, 7), (3, 8)), ((1, 2.5),), 100),
        ask.Sizes(digest, digest, digest, ((3, spec_of(torch.ones(2, 3))),)),
        ask.Call("aten.sum.default", (Handle(1), [1, 2.5, None], "x"), (("dtype", torch.int8),), None, 9),
        ask.Call("aten.to.other", (Handle(1), torch.channels_last, torch.strided), (), None, 9),
        ask.Fetch(5),
        ask.Fetch(5, (3, (2, 2), (2, 1))),
        ask.Free((1, 2, 3)),
        ask.Load("a.safetensors", 8, CHUNK_BYTES + 1, (digest, digest)),
        ask.Stats(),
        ask.Roles(((1, "weight"), (2, "activation"))),
        ask.Configure(KernelSettings()),
        ask.Configure(KernelSettings(torch.float64, 2, mkldnn=False, convolutions="bf16")),
        ask.Pack(1, 2),
        ask.Take(1, bytes(32), torch.float32, (2, 3), (3, 1)),
        ask.Meet(bytes(16), 5),
        ask.Join(bytes(16), 1, 2, "host", 80, "127.0.0.1", 5),
        ask.Reduce(bytes(16), "mean", 1, 2),
        ask.Leave(bytes(16)),
    ]
    assert {type(one) for one in sent} == set(ask.RECORDS)
    data, segments = ask.write_requests(sent)
    arrived = read_requests(wire.unpack_plain(wire.pack_plain(data), 1000), segments)
    assert arrived == sent


@pytest.mark.parametrize(
    "data",
    [
        pytest.param([], id="none"),
        pytest.param(["run"], id="no list"),
        pytest.param([["nothing"]], id="no kind"),
        pytest.param([[["run"]]], id="a list as kind"),
        pytest.param([["run", b"\0" * 32]], id="too few fields"),
        pytest.param([["stats", 1]], id="too many fields"),
        pytest.param([["free", 5]], id="no list of handles"),
        pytest.param([["free", [-1]]], id="a negative handle"),
        pytest.param([["free", [1.0]]], id="a fraction as handle"),
        pytest.param([["fetch", True]], id="a boolean as handle"),
        pytest.param([["chunk", b"\0" * 31, 0]], id="a short digest"),
        pytest.param([["chunk", b"\0" * 32, 1]], id="no such segment"),
        pytest.param([["upload", 1, "float32", [4], [1], [0, 1]]], id="too few bytes"),
        pytest.param([["upload", 1, "float32", [1 << 60], [1], [0, 1]]], id="too large"),
        pytest.param([["upload", 1, "float32", [2], [1], [0, 5]]], id="more segments than there are"),
        pytest.param([["upload", 1, "float32", [2], [1], [0, 1], [b"\0" * 32]]], id="segments and digests"),
        pytest.param([["upload", 1, "uint8", [8], [1], [], [b"\0" * 32] * 2]], id="too many digests"),
        pytest.param([["run", b"\0" * 32, b"\0" * 32, ["x"], [], 0]], id="a text as input"),
        pytest.param([["run", b"\0" * 32, b"\0" * 32, [], [None], 0]], id="None as number"),
        pytest.param([["call", "aten.add.Tensor", [[[[1]]]], [], None, 0]], id="lists in lists"),
        pytest.param([["call", "aten.add.Tensor", [{"h": "x"}], [], None, 0]], id="a text as handle"),
        pytest.param([["call", "aten.add.Tensor", [], ["a"], None, 0]], id="a name without a value"),
        pytest.param([["call", "aten.add.Tensor", [], [], 5, 0]], id="a number to draw from"),
        pytest.param([["load", "x", 0, 1, []]], id="a file without digests"),
        pytest.param([["load", "x", -1, 1, [b"\0" * 32]]], id="before a file"),
        pytest.param([["load", "x" * 5000, 0, 0, []]], id="a long path"),
    ],
)
def test_malformed_requests_are_refused(data: Any) -> None:
    with pytest.raises(WireError):
        read_requests(data, [b"\0" * 8])


# --- chunks ----------------------------------------------------------------------------------------------------------


def test_chunks_are_kept_by_owner_within_the_limit() -> None:
    store = ChunkStore(3 * (CHUNK_BYTES + 2000))
    data = torch.randint(0, 256, (4 * CHUNK_BYTES + 5,), dtype=torch.uint8)
    chunks = list(chunks_of(memory_of(data)))
    assert [len(piece) for _, piece in chunks] == [CHUNK_BYTES] * 4 + [5]
    digests = tuple(digest for digest, _ in chunks)
    for digest, piece in chunks:
        store.put(b"one", digest, piece)
    assert store.missing(b"one", digests) == [0]  # the oldest has gone
    assert store.missing(b"another", digests) == [0, 1, 2, 3, 4]
    assert store.nbytes <= store.limit
    assert bytes(store.get(b"one", digests[4])) == bytes(chunks[4][1])
    with pytest.raises(WireError):
        store.put(b"one", digests[0], chunks[1][1])


def test_chunks_stay_in_the_memory_of_the_tensor_they_became() -> None:
    """Until somebody writes there, or it is given back; memory is kept for what is counted only."""
    store = ChunkStore(16 * CHUNK_BYTES)
    data = torch.randint(0, 256, (2 * CHUNK_BYTES + 5,), dtype=torch.uint8)
    pieces = [(digest, bytes(piece)) for digest, piece in chunks_of(memory_of(data))]
    digests = tuple(digest for digest, _ in pieces)
    packing = packing_of(data.shape, data.stride(), torch.uint8)

    def made() -> torch.Tensor:
        for digest, piece in pieces:
            store.put(b"one", digest, piece)
        return tensor_of([store.get(b"one", digest) for digest in digests], packing, torch.uint8, Host())

    tensor = made()
    counted = store.nbytes
    store.adopt(b"one", digests, tensor.untyped_storage())
    again = made()
    store.adopt(b"one", digests, again.untyped_storage())  # they lie in the first
    assert (store.missing(b"one", digests), store.nbytes) == ([], counted)
    assert torch.equal(again, data)
    again.zero_()
    assert store.missing(b"one", digests) == []
    kept = weakref.ref(tensor.untyped_storage())
    del tensor
    assert kept() is not None
    assert store.get(b"one", digests[1]).obj.storage.nbytes() == len(data)
    view = torch.empty(0, dtype=torch.uint8).set_(kept())
    view[CHUNK_BYTES] += 1
    assert store.get(b"one", digests[1]) is None
    assert (len(store), store.nbytes) == (0, 0)
    del view
    assert kept() is None

    tensor = made()
    store.adopt(b"one", digests, tensor.untyped_storage())
    tensor.untyped_storage().resize_(0)  # it waits elsewhere
    assert store.missing(b"one", digests) == [0, 1, 2]

    zeros = torch.zeros(2 * CHUNK_BYTES, dtype=torch.uint8)
    ((digest, piece), _) = chunks_of(memory_of(zeros))
    store.put(b"one", digest, bytes(piece))
    store.adopt(b"one", (digest, digest), zeros.untyped_storage())
    zeros += 1
    assert bytes(store.get(b"one", digest)) == bytes(CHUNK_BYTES)


def test_chunks_of_one_memory_go_together() -> None:
    store = ChunkStore(4 * (CHUNK_BYTES + 2000))
    data = torch.randint(0, 256, (3 * CHUNK_BYTES,), dtype=torch.uint8)
    chunks = list(chunks_of(memory_of(data)))
    digests = tuple(digest for digest, _ in chunks)
    for digest, piece in chunks:
        store.put(b"one", digest, bytes(piece))
    store.adopt(b"one", digests, data.clone().untyped_storage())
    other = torch.randint(0, 256, (2 * CHUNK_BYTES,), dtype=torch.uint8)
    for digest, piece in chunks_of(memory_of(other)):
        store.put(b"one", digest, bytes(piece))
    assert store.missing(b"one", digests) == [0, 1, 2]
    assert len(store) == 2


# --- files of weights ------------------------------------------------------------------------------------------------
