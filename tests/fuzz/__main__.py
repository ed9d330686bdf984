"""``python -m tests.fuzz``: see ``command.py``."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
