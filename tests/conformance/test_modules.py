"""Every module and optimizer of PyTorch's databases."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db

from .modules import check_module, check_optimizer


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.formatted_name)
def test_module_equals_eager(info: ModuleInfo, training: bool) -> None:
    assert check_module(info, torch.float32, training)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("info", optim_db, ids=lambda info: info.optim_cls.__name__)
def test_optimizer_equals_eager(info: OptimizerInfo, dtype: torch.dtype) -> None:
    assert check_optimizer(info, dtype) or dtype.is_complex
