"""Workers on a Ray cluster: a real one on this machine, where Ray is installed."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

import marid
from marid.errors import AuthenticationError, LazyTensorError
from marid.remote.client.link import Link
from marid.remote.launch import connect as connecting
from marid.remote.launch import ray_cluster as clusters
from marid.remote.wire.endpoints import ClientKey
from marid.report.traffic import traffic

A, B = "remote_accelerator:3", "remote_accelerator:4"


def test_what_does_not_make_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="how many workers"):
        marid.connect("ray:auto")
    with pytest.raises(ValueError, match="and no key"):
        marid.connect("ray://host:10001", workers=1, key="client.json")
    with pytest.raises(ValueError, match="resources for workers on a Ray cluster only"):
        marid.connect(workers=1, resources={"GPU": 1})


def test_it_says_that_ray_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LazyTensorError, match=r"pip install 'marid\[ray\]'"):
        marid.connect("ray:auto", workers=1, first=5)


def test_a_cluster_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What Ray has noted of it outlives one that was killed."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert clusters._found_here() is None
    (tmp_path / "ray").mkdir()
    note = tmp_path / "ray" / "ray_current_cluster"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        note.write_text(f"127.0.0.1:{port}\n")
        assert clusters._found_here() is None
    assert clusters._found_here() == "local"
    note.write_text("no address")
    assert clusters._found_here() == "local"
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert clusters._found_here() is None


_SCRIPT = """
import torch, marid
marid.connect("ray:auto", workers=1)
kept = torch.ones(3, device="remote_accelerator") * 2
print(kept.tolist())
"""


@pytest.mark.conformance
def test_a_script_ends_as_it_would_without_ray() -> None:
    """Ray ends its actors with the process: nobody takes that for a loss."""
    pytest.importorskip("ray")
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[2.0, 2.0, 2.0]")
    assert "Exception" not in done.stderr
    assert "lost" not in done.stderr


# --- a cluster of this process ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[Any]]:
    """Two workers, as connections."""
    pytest.importorskip("ray")
    gc.collect()
    marid.connect("ray:auto", workers=2, resources={"CPU": 0.5}, first=3)
    yield [connecting.connection_of(index) for index in (3, 4)]
    connecting.disconnect(*[index for index in (3, 4) if index in connecting._connected], force=True)


@pytest.mark.conformance
def test_workers_compute_and_copy_to_each_other(cluster: list[Any]) -> None:
    """Over Marid's wire: Ray has nothing to do with it."""
    x = torch.randn(300, 300)
    marid.reset_stats()
    product = (x.to(A) @ x.to(A)).to(B) * 2
    assert torch.equal(product.cpu(), (x @ x) * 2)
    seen = marid.stats().remote
    assert seen is not None
    assert (seen.copies, seen.relayed) == (1, 0)
    group = marid.process_group([A, B])
    assert marid.all_reduce([torch.ones(2).to(A), torch.ones(2).to(B)], group=group)[1].tolist() == [2.0, 2.0]


@pytest.mark.conformance
def test_a_worker_that_is_killed_is_started_again_by_its_actor(cluster: list[Any]) -> None:
    x = torch.arange(5.0).to(A) * 3
    assert x.sum().item() == 30.0
    recoveries = traffic.recoveries
    os.kill(cluster[0]._pid, signal.SIGKILL)
    assert x.tolist() == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert traffic.recoveries == recoveries + 1


@pytest.mark.conformance
def test_an_actor_that_is_killed_is_started_again_by_ray(cluster: list[Any]) -> None:
    import ray  # pyright: ignore[reportMissingImports]

    x = torch.arange(5.0).to(B) * 3
    assert x.sum().item() == 30.0
    before = cluster[1]._pid
    ray.kill(cluster[1].actor, no_restart=False)
    _wait_for(before)  # it may answer until its end
    assert x.tolist() == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert cluster[1]._pid != before
    assert x.sum().item() == 30.0


@pytest.mark.conformance
def test_actors_have_names(cluster: list[Any]) -> None:
    import ray.util  # pyright: ignore[reportMissingImports]

    names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == "marid"]
    assert sum(name.startswith("marid-worker-") for name in names) == 2


@pytest.mark.conformance
def test_nobody_else_is_let_in(cluster: list[Any]) -> None:
    import ray  # pyright: ignore[reportMissingImports]

    found = ray.get(cluster[0].actor.where.remote())
    public, secret = zmq.curve_keypair()
    with pytest.raises(AuthenticationError):
        Link(found["address"])
    with pytest.raises(AuthenticationError):
        Link(found["address"], ClientKey(public, secret, found["key"]))
    assert cluster[0].open().is_encrypted


@pytest.mark.conformance
def test_what_the_cluster_does_not_have_is_said(cluster: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marid.settings, "worker_patience", 1)
    with pytest.raises(LazyTensorError, match=r"no room for 2 worker\(s\) with {'unobtainium': 1}"):
        marid.connect("ray:auto", workers=2, resources={"unobtainium": 1}, first=5)
    assert (torch.ones(2).to(A) + 1).tolist() == [2.0, 2.0]


@pytest.mark.conformance
def test_disconnecting_ends_workers_actors_and_the_cluster(cluster: list[Any]) -> None:
    import ray  # pyright: ignore[reportMissingImports]

    pids = [connection._pid for connection in cluster]
    connecting.disconnect(3, force=True)
    _wait_for(pids[0])
    assert (torch.ones(2).to(B) + 1).tolist() == [2.0, 2.0]
    connecting.disconnect(4, force=True)
    _wait_for(pids[1])
    assert not ray.is_initialized()


def _wait_for(pid: int) -> None:
    """Until a process has ended."""
    until = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until
        time.sleep(0.05)


# --- a cluster that somebody else has started, with a token ----------------------------------------------------------

_TOKEN_SCRIPT = """
import sys, torch, marid
marid.connect(sys.argv[1], workers=1, resources={"CPU": 0.5})
x = torch.arange(4.0).to("remote_accelerator:0")
print("sum", (x * 2).sum().item())
del x
marid.disconnect()
"""


@pytest.fixture
def head(tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A cluster of one node that asks for a token: its address for clients, and the environment with the token."""
    pytest.importorskip("ray")
    pytest.importorskip("grpc")
    ports = [str(_free_port()) for _ in range(2)]
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--num-cpus=2"]
    options = ["--port", ports[0], "--ray-client-server-port", ports[1], "--include-dashboard=false"]
    process = subprocess.Popen(
        [*command, *options], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + 60
        while True:
            assert process.poll() is None
            assert time.monotonic() < until
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(ports[1])), 1):
                break
            time.sleep(0.2)
        yield f"ray://127.0.0.1:{ports[1]}", environment
    finally:
        process.terminate()
        process.wait(30)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.conformance
def test_a_cluster_with_a_token(head: tuple[str, dict[str, str]]) -> None:
    """Who has it can have workers placed; who has another one cannot."""
    address, environment = head

    def run(**changed: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", _TOKEN_SCRIPT, address]
        return subprocess.run(
            command, env={**environment, **changed}, capture_output=True, text=True, timeout=120, check=False
        )

    done = run()
    assert done.returncode == 0, done.stderr
    assert "sum 12.0" in done.stdout
    refused = run(RAY_AUTH_TOKEN=secrets.token_hex(32))
    assert refused.returncode != 0
    assert "sum" not in refused.stdout
