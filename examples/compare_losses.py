"""Show the losses of two runs side by side, and fail when they differ.

    python examples/compare_losses.py lazy.json eager.json

The files are lists of numbers, as ``train_gpt.py --losses`` writes them. When one run was shorter, the steps that both
have are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROWS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description="Show the losses of two runs side by side, and fail when they differ.")
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="largest difference that is none")
    options = parser.parse_args()
    first, second = (json.loads(path.read_text()) for path in (options.first, options.second))
    steps = min(len(first), len(second))
    if steps == 0:
        sys.exit("there are no losses to compare")
    print(f"{'step':>6}  {options.first.stem:>12}  {options.second.stem:>12}  difference")
    for step in sorted({round(row * (steps - 1) / (ROWS - 1)) for row in range(ROWS)}):
        difference = abs(first[step] - second[step])
        print(f"{step + 1:6d}  {first[step]:12.8f}  {second[step]:12.8f}  {difference:10.1e}")
    # Not max(): a loss that is no number must fail too.
    wrong = [step for step in range(steps) if not abs(first[step] - second[step]) <= options.tolerance]
    largest = max(abs(a - b) for a, b in zip(first, second, strict=False))
    print(f"{steps} steps, largest difference {largest:.1e}")
    if wrong:
        sys.exit(f"the losses differ by more than {options.tolerance} from step {wrong[0] + 1} on")


if __name__ == "__main__":
    main()
