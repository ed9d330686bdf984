"""Whose code a source file is, by its path."""

from __future__ import annotations

import os
import re

PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
"""Folders of installed packages; Debian's and Ubuntu's own Python has the second one."""
_STDLIB = os.path.dirname(os.__file__) + os.sep


def is_of_a_package(file: str) -> bool:
    """Whether a source file is of an installed package."""
    return PACKAGES.search(file) is not None


def is_of_the_standard_library(file: str) -> bool:
    """Whether a source file is Python's own."""
    return file.startswith("<frozen ") or (file.startswith(_STDLIB) and not is_of_a_package(file))
