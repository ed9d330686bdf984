"""Well-known models from Hugging Face, unmodified, give on the device exactly what they give on the CPU."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import marid
from tests.helpers import DEVICE, assert_same, train_step

pytest.importorskip("transformers")
from tests.models import CASES, Case

_GENERATING = [case for case in CASES if case.generates]
_BY_NAME = {case.name: case for case in CASES}

_every_model = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
_every_generator = pytest.mark.parametrize("case", _GENERATING, ids=lambda case: case.name)


def _build(case: Case, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return case.build(dropout)


def _inputs(case: Case, labels: bool = False) -> dict[str, Any]:
    torch.manual_seed(2)
    return case.inputs(labels)


def _moved(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}


def _tensors(output: Any) -> Any:
    """The tensors of a model's output in plain dictionaries and tuples; caches give their keys and values."""
    if isinstance(output, Mapping):
        return {key: _tensors(value) for key, value in output.items()}
    if isinstance(output, (list, tuple)):
        return tuple(_tensors(value) for value in output)
    if output is None or isinstance(output, (torch.Tensor, bool, int)):
        return output
    found = {key: _tensors(value) for key, value in vars(output).items() if _is_data(value)}
    assert found, f"no tensors in {type(output).__name__}"
    return found


def _is_data(value: Any) -> bool:
    """Whether a cache's attribute is, or holds, tensors."""
    if isinstance(value, (list, tuple)):
        return any(_is_data(item) for item in value)
    return isinstance(value, torch.Tensor) or hasattr(value, "keys") or "cache" in type(value).__module__


def _no_fallbacks() -> None:
    assert marid.stats().fallbacks == {}


# --- forward ---------------------------------------------------------------------------------------------------------


@_every_model
def test_forward_equals_the_cpu(case: Case) -> None:
    """Every output tensor, hidden states and caches too, bit for bit."""
    model, inputs = _build(case).eval(), {**_inputs(case), "output_hidden_states": True}
    lazy = copy.deepcopy(model).to(DEVICE)
    assert all(p.device.type == DEVICE for p in [*lazy.parameters(), *lazy.buffers()])
    assert_same(_tensors(lazy(**_moved(inputs))), _tensors(model(**inputs)))
    _no_fallbacks()


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "bert", "t5", "whisper", "vit"])
def test_forward_with_plain_attention_equals_the_cpu(name: str) -> None:
    """The attention written out in PyTorch, whose weights can be asked for."""
    case = _BY_NAME[name]
    model = _build(case).eval()
    model.set_attn_implementation("eager")
    inputs = {**_inputs(case), "output_attentions": True}
    lazy = copy.deepcopy(model).to(DEVICE)
    assert_same(_tensors(lazy(**_moved(inputs))), _tensors(model(**inputs)))


@_every_model
def test_a_model_made_on_the_device_has_the_weights_of_one_made_on_the_cpu(case: Case) -> None:
    expected = _build(case).eval()
    with torch.device(DEVICE):
        model = _build(case).eval()
    assert all(p.device.type == DEVICE for p in [*model.parameters(), *model.buffers()])
    assert_same(model.state_dict(), expected.state_dict())
    inputs = _inputs(case)
    assert_same(model(**_moved(inputs))[0], expected(**inputs)[0])


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "resnet"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_forward_in_half_precision_equals_the_cpu(name: str, dtype: torch.dtype) -> None:
    case = _BY_NAME[name]
    model = _build(case).eval().to(dtype)
    inputs = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in _inputs(case).items()}
    lazy = copy.deepcopy(model).to(DEVICE)
    assert_same(lazy(**_moved(inputs))[0], model(**inputs)[0])


def test_a_model_moves_while_a_graph_of_it_is_alive() -> None:
    """As between any two devices; the result of before keeps its value."""
    case = _BY_NAME["gpt2"]
    model, inputs = _build(case).eval(), _inputs(case)
    expected = model(**inputs)[0]
    assert_same(model.to(DEVICE)(**_moved(inputs))[0], expected)
    back = model(**_moved(inputs))[0]
    assert_same(model.cpu()(**inputs)[0], expected)
    assert_same(back, expected)


# --- training --------------------------------------------------------------------------------------------------------


def _train(case: Case, model: nn.Module, inputs: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    """AdamW steps after the same seed; what they leave behind."""
    # CPU tensors take the plain loop by default and device tensors the foreach road: ask both for the same arithmetic.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=True)
    torch.manual_seed(3)
    losses = [train_step(optimizer, case.loss(model, inputs)) for _ in range(steps)]
    return {
        "losses": losses,
        "gradients": {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
    }


@_every_model
def test_training_equals_the_cpu(case: Case) -> None:
    """Losses, gradients, parameters, buffers and the optimizer's state after two steps."""
    model, inputs = _build(case).train(), _inputs(case, labels=True)
    lazy = copy.deepcopy(model).to(DEVICE)
    result = _train(case, lazy, _moved(inputs))
    assert_same(result, _train(case, model, inputs))
    _no_fallbacks()


@pytest.mark.parametrize("case", [case for case in CASES if case.has_dropout], ids=lambda case: case.name)
def test_training_with_dropout_equals_the_cpu(case: Case) -> None:
    """The same with dropout: equal seeds drop the same elements."""
    model, inputs = _build(case, dropout=0.1).train(), _inputs(case, labels=True)
    lazy = copy.deepcopy(model).to(DEVICE)
    result = _train(case, lazy, _moved(inputs))
    assert_same(result, _train(case, model, inputs))
    _no_fallbacks()


# --- generation ------------------------------------------------------------------------------------------------------

_GREEDY = {"do_sample": False}
_SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 0.95}


def _generate(case: Case, model: nn.Module, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
    inputs = {key: value for key, value in inputs.items() if key != "decoder_input_ids"}
    torch.manual_seed(4)
    generate: Callable[..., torch.Tensor] = model.generate
    return generate(**inputs, max_new_tokens=8, **options)


def _generates_the_same(case: Case, **options: Any) -> None:
    model, inputs = _build(case).eval(), _inputs(case)
    expected = _generate(case, model, inputs, **options)
    tokens = _generate(case, model.to(DEVICE), _moved(inputs), **options)
    assert tokens.device.type == DEVICE
    assert_same(tokens, expected)
    _no_fallbacks()


@_every_generator
@pytest.mark.parametrize("options", [_GREEDY, _SAMPLED], ids=["greedy", "sampled"])
def test_generation_with_a_dynamic_cache_gives_the_same_tokens(case: Case, options: dict[str, Any]) -> None:
    _generates_the_same(case, **options)


@pytest.mark.parametrize("case", [case for case in _GENERATING if case.static_cache], ids=lambda case: case.name)
@pytest.mark.parametrize("options", [_GREEDY, _SAMPLED], ids=["greedy", "sampled"])
def test_generation_with_a_static_cache_gives_the_same_tokens(case: Case, options: dict[str, Any]) -> None:
    """The cache is written in place, at positions that the device holds."""
    _generates_the_same(case, cache_implementation="static", **options)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_beam_search_gives_the_same_tokens(name: str) -> None:
    _generates_the_same(_BY_NAME[name], num_beams=3, do_sample=False)


def test_generation_of_a_model_made_on_the_device() -> None:
    case = _BY_NAME["llama"]
    expected = _generate(case, _build(case).eval(), _inputs(case))
    with torch.device(DEVICE):
        model = _build(case).eval()
    assert_same(_generate(case, model, _moved(_inputs(case))), expected)


def test_one_program_serves_every_token_with_a_static_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes stay the same from token to token, so nothing new is built once it is known that the loop comes again."""
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)  # so small a model would run at once
    case = _BY_NAME["llama"]
    model, inputs = _build(case).eval().to(DEVICE), _moved(_inputs(case))
    model.generation_config.eos_token_id = None  # run to the end
    for _ in range(2):
        _generate(case, model, inputs, cache_implementation="static")
    marid.reset_stats()
    _generate(case, model, inputs, cache_implementation="static")
    assert marid.stats().programs_built == 0
    assert marid.stats().programs_reused > 0


# --- saving and loading ----------------------------------------------------------------------------------------------


@_every_model
def test_state_dict_goes_through_a_file(case: Case) -> None:
    """Saved from the device, loaded with ``weights_only=True`` there and on the CPU; ties survive."""
    model = _build(case)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    file = io.BytesIO()
    torch.save(model.to(DEVICE).state_dict(), file)
    for place in (None, "cpu"):
        file.seek(0)
        state = torch.load(file, map_location=place, weights_only=True)
        assert all(value.device.type == (place or DEVICE) for value in state.values())
        assert_same(dict(state), expected)
    torch.manual_seed(5)  # other weights
    fresh = case.build(0.0).to(DEVICE)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert_same(dict(fresh.state_dict()), expected)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_pretrained_folder_round_trip(name: str, tmp_path: Path) -> None:
    """``save_pretrained`` from the device, with and without tied weights, and ``from_pretrained`` moved back to it."""
    case = _BY_NAME[name]
    model, inputs = _build(case).eval(), _inputs(case)
    expected = model(**inputs)[0]
    lazy = copy.deepcopy(model).to(DEVICE)
    lazy.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, local_files_only=True)
    assert_same(loaded.eval().to(DEVICE)(**_moved(inputs))[0], expected)
