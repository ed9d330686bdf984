"""``marid run --as-cuda``: a process in which ``"cuda"`` means ``remote_accelerator``.

A script written for GPUs sees the world of a machine with one GPU: the default device is the CPU, ``torch.cuda`` says
that a device is there, ``.cuda()``, ``"cuda"`` and ``torch.device("cuda:0")`` lead to it, and tensors on it say that
they are on ``cuda:0``. A ``TorchFunctionMode`` translates what passes through PyTorch's functions, in every thread; the
few entry points that function modes do not see are replaced.

Groups of NCCL are groups of gloo. Not covered, because they need CUDA itself: CUDA graphs and custom kernels.
"""

from __future__ import annotations

from marid.as_cuda.entries import replace_entries
from marid.as_cuda.functions import enter_everywhere
from marid.as_cuda.groups import replace_backends
from marid.as_cuda.module import replace_torch_cuda


def install() -> None:
    """Let ``"cuda"`` mean the device from now on, in this process. There is no way back."""
    replace_torch_cuda()
    replace_entries()
    replace_backends()
    enter_everywhere()
