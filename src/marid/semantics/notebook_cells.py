"""The cells of a notebook: IPython gives their code the names of files that it makes up, and people know them by their
numbers."""

from __future__ import annotations

import sys


def name_of(file: str) -> str:
    """``In[3]`` for the code of a cell that has run, in a process that has IPython; any other file as it is."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    describe = None if shell is None else getattr(shell.compile, "format_code_name", None)  # IPython's own compiler's
    named = None if describe is None else describe(file)
    return file if named is None else named[1]
