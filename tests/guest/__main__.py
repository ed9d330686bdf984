"""``python -m tests.guest STATE FILE``: write what each use gives in a process that has so much of Marid."""

from __future__ import annotations

import json
import re
import sys
import warnings
from typing import Any

import torch

from tests.guest import extending, objects, process, programs, training, utilities  # noqa: F401  (they list uses)
from tests.guest.common import USES, told


def main() -> None:
    found: dict[str, Any] = {}
    for name, function in USES.items():
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = told(function())
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
        texts = sorted({f"{warning.category.__name__}: {warning.message}" for warning in caught})
        text = json.dumps([result, texts])
        found[name] = json.loads(re.sub(r"0x[0-9a-f]+", "0x", text))
    with open(sys.argv[2], "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
