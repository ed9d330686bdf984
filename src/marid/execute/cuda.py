"""CUDA devices: copies on a stream of their own, and work captured as CUDA graphs.

Sources: the notes "CUDA semantics" and "CUDA Graphs" of PyTorch's documentation, and ``torch/cuda/graphs.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch


class Cuda:
    """One CUDA device; it is the current one of this thread from now on.

    Programs run on the thread's current stream. What is uploaded goes through pinned memory on a stream beside it, so
    that it arrives while what was launched before still runs.
    """

    captures = True
    pins = True

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        self._device = device
        self._copying = torch.cuda.Stream(device)
        self._capturing = torch.cuda.Stream(device)
        # One for all graphs: a program's graphs run one after the other, and what leaves a run is copied out of it.
        self._pool = torch.cuda.graph_pool_handle()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements on the device; what is launched from now on waits for them, and this thread does not."""
        running = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._copying):
            made = tensor.to(self._device, non_blocking=True)
        running.wait_stream(self._copying)
        made.record_stream(running)
        return made

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements in pinned memory, behind all that was launched before."""
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu", pin_memory=tensor.numel() > 0
        )
        made.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return made

    def wait(self) -> bool:
        """Wait until all that was launched has been done; whether that took any waiting."""
        if self.is_idle():
            return False
        torch.cuda.current_stream(self._device).synchronize()
        return True

    def wait_for_uploads(self) -> None:
        """Wait until what ``to_device`` was given may be written again."""
        self._copying.synchronize()

    def is_idle(self) -> bool:
        """Whether all that was launched has been done."""
        return torch.cuda.current_stream(self._device).query()

    def trim(self) -> None:
        """Give back memory that PyTorch's allocator for the device keeps."""
        torch.cuda.empty_cache()

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """A CUDA graph of what ``launch`` launches."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._capturing):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                launch()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # what could not be captured has ended it
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay
