"""Tests: see CONTRIBUTING.md."""

import os

# PyTorch's kernels for AMX (oneDNN, PyTorch 2.13) read memory that nobody wrote, in gradients of strided convolutions
# in bfloat16, and end the process in others: what is compared would be another thing at each run. It is read when
# PyTorch is imported.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
