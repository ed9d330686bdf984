"""What a process has around tensors: threads, signals, loaders, forks, process groups, profiles."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import warnings
from typing import Any

import torch

from tests.guest.common import STATE, Small, data, use


@use
def threads() -> Any:
    found = [torch.autograd.is_multithreading_enabled()]

    def work() -> None:
        Small()(data(2, 4)).sum().backward()
        found.append(torch.autograd.is_multithreading_enabled())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    work()
    return found


@use
def signals() -> Any:
    handler = signal.getsignal(signal.SIGINT)
    caught = []
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):
            Small()(data(2, 4))
    except KeyboardInterrupt:
        caught.append("interrupt")
    return repr(handler), [str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1)], caught


@use
def setters() -> Any:
    found = [torch.set_num_threads is torch._C.set_num_threads]
    before = torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True)
    found += [torch.get_num_threads(), str(torch.ones(1).dtype), torch.get_float32_matmul_precision()]
    found += [torch.are_deterministic_algorithms_enabled(), str(torch.get_default_device())]
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(before[0])
    torch.set_default_dtype(before[1])
    torch.set_float32_matmul_precision(before[2])
    return found


@use
def filters_and_finders() -> Any:
    if STATE == "used":  # see the table in marid.guest
        return None
    return len(sys.meta_path), len(warnings.filters), sys.excepthook is sys.__excepthook__


class Squares(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, index**2]), {"name": str(index)}


@use
def data_loader() -> Any:
    return list(torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=2))


_NO_ACCELERATOR = (
    "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be used."
)


@use
def data_loader_with_pinning() -> Any:
    if STATE == "used":  # there is a device then, for which it pins
        loader = torch.utils.data.DataLoader(Squares(), batch_size=3, pin_memory=True)
        assert all(x.is_pinned() for x, _ in loader)
        warnings.warn(_NO_ACCELERATOR, UserWarning, stacklevel=1)
        return list(loader)
    return list(torch.utils.data.DataLoader(Squares(), batch_size=3, pin_memory=True))


@use
def pinned_memory() -> Any:
    return data(2).is_pinned(), torch.empty(2, pin_memory=False).is_pinned()


@use
def pinning() -> Any:
    return None if STATE == "used" else data(2).pin_memory()


def in_child(queue: Any) -> None:
    model = Small()
    model(data(2, 4)).sum().backward()
    queue.put([parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None])


@use
def forks() -> Any:
    Small()(data(2, 4)).sum().backward()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=in_child, args=(queue,))
    process.start()
    found = queue.get(timeout=60)
    process.join()
    return len(found), process.exitcode


@use
def shared_memory() -> Any:
    x = data(4).share_memory_()
    queue = torch.multiprocessing.get_context("fork").SimpleQueue()
    queue.put(x)
    return queue.get(), x.is_shared()


@use
def profiler() -> Any:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        Small()(data(2, 4)).sum().backward()
    return sorted({event.key for event in profile.key_averages() if event.key.startswith("aten::")})


@use
def distributed() -> Any:
    from torch import distributed as dist
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
    from torch.nn.parallel import DistributedDataParallel

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        model = DistributedDataParallel(Small())
        model(data(2, 4)).sum().backward()
        mesh = DeviceMesh("cpu", [0])
        whole = (distribute_tensor(data(4, 2), mesh, [Shard(0)]) * 2 + 1).full_tensor()
        gathered: list[Any] = [None]
        dist.all_gather_object(gathered, "here")
        found = [parameter.grad for parameter in model.parameters()], whole, gathered
        dist.destroy_process_group()
        dist.init_process_group(init_method=f"file://{folder}/other", rank=0, world_size=1)
        reduced = data(3)
        dist.all_reduce(reduced)
        dist.destroy_process_group()
    return found, reduced


@use
def generators() -> Any:
    torch.manual_seed(3)
    first = torch.rand(2)
    with torch.random.fork_rng([] if STATE == "used" else None):  # it warns of many devices
        torch.rand(2)
    return first, torch.rand(2), torch.get_rng_state().sum()


@use
def backward_through_many() -> Any:
    x = data(2).requires_grad_()
    y = x
    for _ in range(50):
        y = y * 1.01
    return torch.autograd.grad(y.sum(), x), torch.autograd.functional.jacobian(torch.sin, data(2))
