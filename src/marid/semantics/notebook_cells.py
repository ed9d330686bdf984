"""The cells of a notebook: files to Python, with names that nobody knows, and numbers to whoever wrote them."""

from __future__ import annotations

import sys

__all__ = ["name_of"]


def name_of(file: str) -> str:
    """``In[3]`` for the code of a cell that has run, in a process that has IPython; any other file as it is."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    named = None if shell is None else shell.compile.format_code_name(file)
    return file if named is None else named[1]
