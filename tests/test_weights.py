"""``marid.load_file``: weights of a safetensors file, on a device of this process and on a worker's."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blake3
import pytest
import torch

import marid
from marid.engine.safetensors import read_file
from marid.errors import WorkerLostError
from marid.remote.client import uploads as offers
from marid.remote.launch.connect import connection_of, disconnect
from marid.remote.worker.chunk_store import ChunkStore
from marid.report.traffic import RemoteStats

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}
WORKER = "remote_accelerator:4"
MB = 1 << 20


def write(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        raw = bytes(tensor.reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else b""
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    return write(path, header, data)


@pytest.fixture(scope="module", autouse=True)
def _worker() -> Iterator[None]:
    marid.connect(workers=1, first=4)
    yield
    disconnect(4, force=True)


def kill() -> None:
    process = connection_of(4).worker.process
    process.kill()
    process.wait()


def check(found: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].stride() == tensor.stride()
        assert torch.equal(found[name].cpu(), tensor), name


def moved() -> RemoteStats:
    found = marid.stats().remote
    assert found is not None
    return found


@pytest.mark.parametrize("device", ["remote_accelerator:3", WORKER])
def test_a_file_is_loaded(device: str, tmp_path: Path) -> None:
    tensors = {
        "odd": torch.tensor([True, False, True]),  # what follows is not aligned
        "large": torch.randn(1100, 2000),
        "half": torch.randn(1500, 1000).bfloat16(),
        "small": torch.arange(5),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
    }
    found = marid.load_file(write_tensors(tmp_path / "a", tensors), device)
    assert {str(one.device) for one in found.values()} == {device}
    check(found, tensors)
    found["large"].add_(1)
    check(marid.load_file(tmp_path / "a", device), tensors)  # the file, and what was kept, are as they were


def test_the_worker_reads_the_file_itself(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3 * MB), "b": torch.randn(2 * MB), "c": torch.randn(10)}
    path = write_tensors(tmp_path / "a", tensors)
    marid.reset_stats()
    found = marid.load_file(path, WORKER)
    assert found["a"][-1].item() + found["b"][5].item() == tensors["a"][-1].item() + tensors["b"][5].item()
    assert moved().bytes_up < 16 << 10
    assert moved().bytes_down < 16 << 10
    check(found, tensors)


def test_a_worker_that_has_another_file_is_sent_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another machine: the worker looks under the same path and finds nothing, or something else."""
    path, theirs, real = tmp_path / "ours", tmp_path / "theirs", offers._load

    def elsewhere(of: Any) -> Any:
        load = real(of)
        return type(load)(str(theirs), load.offset, load.nbytes, load.digests)

    monkeypatch.setattr(offers, "_load", elsewhere)
    for exists in (False, True):
        torch.manual_seed(100 + exists)  # other contents than those of other tests
        tensors = {"a": torch.randn(3 * MB), "b": torch.randn(2 * MB)}
        write_tensors(path, tensors)
        if exists:
            changed = tensors["a"].clone()
            changed[-1] += 1
            write_tensors(theirs, {"a": changed, "b": tensors["b"]})
        marid.reset_stats()
        found = marid.load_file(path, WORKER)
        assert found["a"][-1].item() + found["b"][5].item() == tensors["a"][-1].item() + tensors["b"][5].item()
        nbytes = 4 * MB if exists else 20 * MB  # the last chunk of `a`, or all
        assert nbytes <= moved().bytes_up < nbytes + MB
        check(found, tensors)


def test_a_lost_worker_loads_again(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(2 * MB), "b": torch.randn(5)}
    found = marid.load_file(write_tensors(tmp_path / "a", tensors), WORKER)
    doubled = found["a"] * 2
    marid.materialize(doubled)
    kill()
    marid.reset_stats()
    assert torch.equal(doubled[:10].cpu(), 2 * tensors["a"][:10])
    assert moved().recoveries == 1
    assert moved().bytes_up < 64 << 10
    check(found, tensors)


def test_a_file_that_was_changed_is_not_taken_for_what_it_was(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(2 * MB), "b": torch.randn(MB)}
    path = write_tensors(tmp_path / "a", tensors)
    found = marid.load_file(path, WORKER)
    assert (found["a"][:3] + found["b"][:3]).sum().item() != 0
    write_tensors(path, {"a": tensors["a"] + 1, "b": tensors["b"]})
    kill()
    with pytest.raises(WorkerLostError, match="changed"):
        found["a"].cpu()
    assert torch.equal(found["b"].cpu(), tensors["b"])


def test_a_file_that_changes_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker does not find what the client has read, and then the client does not either."""
    path = write_tensors(tmp_path / "a", {"a": torch.randn(MB // 2)})  # so small that it is sent with the read
    found = marid.load_file(path, WORKER)
    write_tensors(path, {"a": torch.randn(MB // 2)})
    with pytest.raises(OSError, match="changed"):
        found["a"].cpu()
    assert torch.ones(3, device=WORKER).sum().item() == 3
    with pytest.raises(OSError, match="changed"):
        (found["a"] + 1).cpu()


def test_a_model_takes_them(tmp_path: Path) -> None:
    model = torch.nn.Linear(1000, 700)
    path = write_tensors(tmp_path / "a", {name: one.detach() for name, one in model.state_dict().items()})
    other = torch.nn.Linear(1000, 700, device=WORKER)
    other.load_state_dict(marid.load_file(path, WORKER))
    x = torch.randn(3, 1000)
    assert torch.equal(other(x.to(WORKER)).cpu(), model(x))


@pytest.mark.parametrize(
    ("header", "length"),
    [
        pytest.param({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}, None, id="too many bytes"),
        pytest.param({"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, None, id="behind the end"),
        pytest.param({"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, None, id="before the start"),
        pytest.param({"w": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 8]}}, None, id="huge"),
        pytest.param(
            {"w": {"dtype": "F32", "shape": [1 << 47, 1 << 47, 0], "data_offsets": [0, 0]}}, None, id="huge and empty"
        ),
        pytest.param({"w": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}, None, id="no dtype"),
        pytest.param({"w": {"shape": [2], "data_offsets": [0, 8]}}, None, id="dtype missing"),
        pytest.param({"w": [1]}, None, id="no map"),
        pytest.param([1], None, id="a list"),
        pytest.param(b"{", None, id="no JSON"),
        pytest.param({}, 1 << 62, id="a header that claims more than there is"),
    ],
)
def test_files_that_are_damaged_are_refused(tmp_path: Path, header: Any, length: int | None) -> None:
    with pytest.raises(ValueError, match=r"safetensors|malformed|elements|no tensor can"):
        read_file(write(tmp_path / "x", header, b"\0" * 8, length))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        marid.load_file(tmp_path / "none", WORKER)
    (tmp_path / "nothing").write_bytes(b"")
    with pytest.raises(ValueError, match="safetensors"):
        marid.load_file(tmp_path / "nothing", WORKER)
    with pytest.raises(ValueError, match="not to cpu"):
        marid.load_file(tmp_path / "none", "cpu")


def test_no_file_is_read_by_guessing_its_bytes(tmp_path: Path) -> None:
    """A client that names the hash of every byte there is learns nothing of a file that only the worker may read."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"hunter2")
    store = ChunkStore(1 << 20)
    for guess in range(256):
        assert store.load(b"", str(secret), 0, 1, (blake3.blake3(bytes([guess])).digest(),)) == [0]
