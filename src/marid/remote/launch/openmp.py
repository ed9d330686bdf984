"""How OpenMP's threads wait in a worker.

GNU's OpenMP lets threads wait actively between parallel loops, but hardly does so once all teams of a process together
have more threads than there are processors. A worker has two teams while it runs something in the background, and each
loop of the other one would begin by waking its threads. With ``OMP_WAIT_POLICY=ACTIVE`` they wait ten times longer even
then; ``GOMP_SPINCOUNT`` is the wait when there is one team, as without these settings (libgomp manual, "Environment
Variables"). They are read once, when PyTorch is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

_SETTINGS = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "300000"}


def openmp_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a worker; nothing where its user has set any of it."""
    chosen = sys.platform != "linux" or any(name in environment for name in _SETTINGS)
    return {} if chosen else dict(_SETTINGS)


def begin_again() -> None:
    """Have this process begin again, with these settings, unless it has them or others."""
    added = openmp_settings(os.environ)
    if added:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **added})
