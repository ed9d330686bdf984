"""``python -m marid``."""

from marid.cli import main

if __name__ == "__main__":
    main()
