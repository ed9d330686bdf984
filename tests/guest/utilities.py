"""PyTorch's tools, and what a program can see of PyTorch and of its process."""

from __future__ import annotations

import copy
import gc
import io
import logging
import os
import pickle
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.guest.common import STATE, Small, data, use

# What the device is made of: PyTorch gives tensors, storages and modules these, by the name that a backend takes.
_OURS = ("remote_accelerator", "privateuse")


def _others(names: Any) -> list[str]:
    return sorted(name for name in names if not any(ours in name.lower() for ours in _OURS))


@use
def names() -> Any:
    spaces = (torch, torch.Tensor, nn, nn.Module, nn.functional, torch.optim, torch.autograd, torch.backends, torch._C)
    spaces += (torch.storage.UntypedStorage, torch.storage.TypedStorage, torch.utils, torch.nn.utils.rnn.PackedSequence)
    return [_others(dir(space)) for space in spaces]


@use
def numbers_that_tell() -> Any:
    return (
        *(torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_default_dtype()),
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_warn_always_enabled()),
        *(torch.backends.mkldnn.enabled, torch.backends.mkl.is_available(), torch.backends.openmp.is_available()),
        *(torch.are_deterministic_algorithms_enabled(), torch.backends.cpu.get_cpu_capability()),
        *(torch.autograd.is_multithreading_enabled(), torch.autograd.is_view_replay_enabled()),
        *(torch.cuda.is_available(), torch.backends.mps.is_available(), torch.get_rng_state().numel()),
        *(torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
    )


@use
def device_names() -> Any:
    texts = []
    for name in ("cuda", "cpu:0", "meta", "mps", "xpu", "nonsense", "cuda:99"):
        try:
            texts.append(repr(torch.device(name)))
            torch.ones(1, device=name)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            texts.append(f"{type(error).__name__}: {str(error)[:100]}")
    return texts


@use
def the_accelerator() -> Any:
    if STATE == "used":
        return [False, None, 0]
    return [
        torch.accelerator.is_available(),
        torch.accelerator.current_accelerator(True),
        torch.accelerator.device_count(),
    ]


@use
def default_devices() -> Any:
    with torch.device("meta"):
        meta = torch.ones(2), nn.Linear(2, 2).weight
    torch.set_default_device("cpu")
    made = torch.ones(2).device
    torch.set_default_device(None)
    return [str(x.device) for x in meta], str(made), str(torch.get_default_device())


@use
def environment() -> Any:
    return sorted(name for name in os.environ if not name.startswith("MARID"))


@use
def loggers() -> Any:
    root = logging.getLogger()
    return len(root.handlers), root.level, logging.getLogger("torch").level, len(logging.getLogger("torch").handlers)


@use
def the_process() -> Any:
    hooks = (sys.displayhook is sys.__displayhook__, sys.unraisablehook is sys.__unraisablehook__)
    hooks += (sys.gettrace(), sys.getprofile(), threading.excepthook.__module__, len(sys.path_hooks))
    return *hooks, len(gc.callbacks), gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), sys.getrecursionlimit()


@use
def threads_that_there_are() -> Any:
    Small()(data(2, 4)).sum().backward()
    return None if STATE == "used" else sorted(thread.name for thread in threading.enumerate())


@use
def collecting() -> Any:
    seen: list[str] = []

    def callback(phase: str, _info: Any) -> None:
        seen.append(phase)

    gc.callbacks.append(callback)
    model = Small()
    model.itself = [model]  # type: ignore[assignment]
    del model
    gc.collect()
    gc.callbacks.remove(callback)
    return seen


@use
def timers() -> Any:
    from torch.utils.benchmark import Timer

    timer = Timer("x + 1", globals={"x": data(3)}, num_threads=1)
    return len(timer.timeit(3).times), timer.timeit(3).number_per_run


@use
def packages() -> Any:
    from torch.package import PackageExporter, PackageImporter

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "package.pt"
        with PackageExporter(str(path)) as exporter:
            exporter.extern("**")
            exporter.save_pickle("model", "model.pkl", Small())
            exporter.save_text("model", "text", "here")
        importer = PackageImporter(str(path))
        return importer.load_pickle("model", "model.pkl")(data(1, 4)), importer.load_text("model", "text")


class Kept:
    def __init__(self) -> None:
        self.x = data(2)


@use
def safe_files() -> Any:
    file = io.BytesIO()
    torch.save(Kept(), file)
    texts: list[Any] = [len(torch.serialization.get_safe_globals())]
    for safe in ([], [Kept]):
        file.seek(0)
        with torch.serialization.safe_globals(safe):
            try:
                texts.append(torch.load(file, weights_only=True).x)
            except pickle.UnpicklingError as error:
                texts.append(str(error)[:200])
    return texts


@use
def files() -> Any:
    found: list[Any] = []
    for options in ({}, {"_use_new_zipfile_serialization": False}):
        file = io.BytesIO()
        torch.save({"p": nn.Parameter(data(2)), "s": data(4).storage(), "v": data(6)[::2]}, file, **options)
        for location in (None, "cpu", lambda storage, place: storage, {"cpu": "cpu"}):
            file.seek(0)
            got = torch.load(file, map_location=location, weights_only=False)
            found.append([got["p"], got["s"].tolist(), got["v"], got["v"].stride()])
    with tempfile.TemporaryDirectory() as folder:
        torch.save(Small().state_dict(), f"{folder}/x")
        mapped = torch.load(f"{folder}/x", mmap=True, weights_only=True)
        with torch.serialization.skip_data():
            torch.save(data(2), f"{folder}/y")
    return found, mapped


@use
def checkpoints_of_training() -> Any:
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(3):
        model(data(2, 4)).sum().backward()
        optimizer.step()
        schedule.step()
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), schedule.state_dict()], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    again = torch.optim.AdamW(Small().parameters())
    again.load_state_dict(states[1])
    return states, list(again.state_dict()["state"]), copy.deepcopy(optimizer).state_dict()


@use
def scaled_training() -> Any:
    model, scaler = Small(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(data(2, 4)).sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return norm, scaler.get_scale(), list(model.parameters())


@use
def other_layouts() -> Any:
    sparse = torch.eye(3).to_sparse()
    nested = torch.nested.nested_tensor([data(2, 3), data(1, 3)], layout=torch.jagged)
    quantized = torch.quantize_per_tensor(data(3), 0.1, 0, torch.qint8)
    masked = torch.masked.masked_tensor(data(2), torch.tensor([True, False]))
    found = [(sparse @ data(3, 3)), sparse.to_sparse_csr().crow_indices(), (nested * 2).values(), quantized.int_repr()]
    return [*found, (masked + 1).get_data(), data(3).to_mkldnn().relu().to_dense()]


@use
def printed() -> Any:
    return repr(data(2, 2)), str(Small()), f"{data(1).sum():.2f}", repr(nn.Parameter(data(1))), str(torch.device("cpu"))


@use
def interchange() -> Any:
    import numpy as np

    x = data(3)
    shared = torch.from_numpy(np.ones(2, dtype=np.float32))
    through = torch.utils.dlpack.from_dlpack(x), torch.from_dlpack(np.ones(2)), torch.as_tensor([np.float64(1.5)])
    return (
        *through,
        shared,
        np.asarray(x).tolist(),
        np.add(x, 1).tolist(),
        torch.frombuffer(bytearray(8), dtype=torch.float32),
    )


@use
def errors() -> Any:
    texts = []
    for wrong in (
        lambda: data(2) + data(3),
        lambda: data(2, 2) @ data(3, 3),
        lambda: nn.Linear(2, 2)(data(3)),
        lambda: torch.ones(2, dtype=torch.int64).requires_grad_(),
        lambda: data(2).backward(),
        lambda: torch.topk(data(2), 3),
        lambda: torch.chunk(data(2), 0),
        lambda: torch.zeros(2)[5],
        lambda: torch.empty(1 << 60),
        lambda: torch.ones(1, device="meta").item(),
        lambda: torch.ops.aten.nothing,
        lambda: torch.nothing,  # type: ignore[attr-defined]
        lambda: data(2).nothing,
        lambda: torch.set_num_threads("x"),  # type: ignore[arg-type]
        lambda: bool(data(2)),
        lambda: torch.distributed.all_reduce(data(2)),
    ):
        try:
            texts.append(str(wrong()))
        except Exception as error:
            texts.append(f"{type(error).__name__}: {str(error)[:300]}")
    return texts


@use
def random_numbers() -> Any:
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(5)
    state = torch.get_rng_state()
    found = torch.rand(2), torch.rand(2, generator=generator), torch.default_generator.initial_seed()
    torch.set_rng_state(state)
    return *found, torch.randn(2), torch.randperm(4), nn.functional.dropout(torch.ones(6)), torch.seed() > 0


@use
def distributions() -> Any:
    normal = torch.distributions.Normal(data(2), 1.0)
    return (
        normal.rsample(),
        torch.distributions.kl_divergence(normal, normal),
        torch.distributions.Gamma(1.0, 1.0).sample(),
    )


@use
def inference() -> Any:
    with torch.inference_mode():
        x = Small()(data(2, 4))
    try:
        x.requires_grad_()
    except RuntimeError as error:
        return x.is_inference(), str(error)
    return None


@use
def flops_and_memory() -> Any:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        Small()(data(2, 4)).sum().backward()
    with torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True) as profile:
        Small()(data(2, 4))
    sizes = {event.key: event.self_cpu_memory_usage for event in profile.key_averages() if "addmm" in event.key}
    return counter.get_total_flops(), sizes


@use
def recurrent() -> Any:
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    packed = pack_padded_sequence(data(3, 2, 4), torch.tensor([3, 1]))
    found = [pad_packed_sequence(kind(4, 3)(packed)[0]) for kind in (nn.LSTM, nn.GRU, nn.RNN)]
    return found, nn.MultiheadAttention(4, 2)(data(2, 1, 4), data(2, 1, 4), data(2, 1, 4))


@use
def futures() -> Any:
    task = torch.jit.fork(torch.sin, data(2))
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(3)
    return torch.jit.wait(task), future.then(lambda f: f.value() + 1).wait()
