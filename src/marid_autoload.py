"""What PyTorch calls at the end of its own import, where Marid is installed: it makes the device known.

Not where PyTorch may find an accelerator of its own: it has one accelerator in a process, a foreign device that is
registered before any other, and autograd on the other's tensors then ends with an internal assertion
(pytorch/pytorch#161129). There ``import marid`` is needed, in processes that do not train on that one.

Outside of the package, so that nothing of it is imported where ``MARID_AUTOLOAD=0`` switches this off.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path

__all__ = ["autoload"]


def autoload() -> None:
    """Register the device, as ``import marid`` does; the rest is loaded by that import, or by the first tensor.

    In processes that a script under ``marid run`` has spawned, go on with that.
    """
    if "MARID_RUN" in os.environ:
        if _is_spawned():
            importlib.import_module("marid.runner").go_on_in_child()
            return
        del os.environ["MARID_RUN"]  # a program of its own, whose children are its own too
    if os.environ.get("MARID_AUTOLOAD", "1").strip().lower() in ("", "0", "false", "no", "off"):
        return
    if "marid" in sys.modules:  # whose own import has imported PyTorch
        return
    if _may_have_accelerator():
        return
    package = sys.modules["marid"] = types.ModuleType("marid")
    package.__path__ = [str(Path(__file__).with_name("marid"))]
    try:
        importlib.import_module("marid.registration").register()
    finally:
        del sys.modules["marid"]  # an import of it is still to come


def _is_spawned() -> bool:
    """Whether ``multiprocessing`` has started this process, or the server that is forked for it."""
    starts = "--multiprocessing-fork", "from multiprocessing.forkserver import "
    return any(argument.startswith(starts) for argument in sys.orig_argv)


_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # of CUDA, of ROCm, and of either under Windows


def _may_have_accelerator() -> bool:
    """Whether this PyTorch is built for an accelerator whose driver is there. Asking the driver would take longer than
    all of this, and keep it from children that are forked."""
    torch = sys.modules["torch"]
    if torch.version.cuda or torch.version.hip:
        return any(map(os.path.exists, _DRIVERS))
    if torch.version.xpu:
        return os.path.exists("/dev/dri")
    return torch.backends.mps.is_built()
