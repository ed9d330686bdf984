"""``marid.quantize``: modules whose weights are packed compute what they compute with the elements of these."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator

import gguf
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import marid
from marid.frontend import quantized
from marid.frontend.quantized import QuantizedTensor
from marid.frontend.quantized_operators import PACKED_HERE, pack

from .helpers import DEVICE

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"vocab_size": 160, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    """An operation that unpacks a whole matrix warns."""
    quantized._said.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*packed matri.*")
        yield


def _unpacked(model: nn.Module) -> nn.Module:
    """The same with ordinary weights, that have the elements of the packed ones."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, QuantizedTensor):
                setattr(module, name, nn.Parameter(parameter.dequantize(), requires_grad=False))
    return plain


@pytest.mark.parametrize("packing", PACKED_HERE)
@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_matrices_are_packed_as_ggml_packs_them(packing: str, device: str) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(6, 4, 96) * torch.tensor([1e-6, 0.1, 1, 30, 1e4, 0])[:, None, None]
    matrix[1, 0, :33] = 0.5  # equal elements, and halves that are rounded
    matrix[2, 1] = torch.arange(96) - 47.5
    expected = gguf.quants.quantize(matrix.numpy(), gguf.GGMLQuantizationType[packing])
    found = pack(matrix.to(device), packing)
    assert torch.equal(found.cpu(), torch.from_numpy(expected))


def _families() -> dict[str, transformers.PreTrainedModel]:
    torch.manual_seed(0)
    gpt2 = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=160, n_positions=64)
    return {
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
        "qwen": transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, tie_word_embeddings=True)),
        "gpt2": transformers.GPT2LMHeadModel(gpt2),
        "mixtral": transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**SIZES, num_local_experts=4, experts_implementation="eager")
        ),
    }


@pytest.mark.parametrize("packing", ["q8_0", "Q4_0"])
@pytest.mark.parametrize("family", ["llama", "qwen", "gpt2", "mixtral"])
def test_models_generate_what_they_generate_with_the_packed_elements(family: str, packing: str) -> None:
    """On the CPU and on the device, to which a packed model moves packed; and packed on the device."""
    model = _families()[family].eval()
    there = copy.deepcopy(model).to(DEVICE)
    bytes_before = sum(one.nbytes for one in model.parameters())
    assert marid.quantize(model, packing) is model
    packed = [one for one in model.parameters() if isinstance(one, QuantizedTensor)]
    assert len(packed) >= 8
    assert sum(one.packed_bytes for one in packed) < bytes_before / 3
    prompt = torch.arange(10)[None] % 160

    def generated(model: transformers.PreTrainedModel, device: str) -> torch.Tensor:
        return model.generate(prompt.to(device), max_new_tokens=8, do_sample=False, pad_token_id=0).cpu()

    plain = _unpacked(model)
    expected = generated(plain, "cpu")
    with torch.no_grad():
        logits = plain(prompt).logits
        torch.testing.assert_close(model(prompt).logits, logits, rtol=1e-3, atol=1e-3)
    assert torch.equal(generated(model, "cpu"), expected)
    marid.quantize(there, packing)
    for one, other in zip(model.parameters(), there.parameters(), strict=True):
        assert isinstance(one, QuantizedTensor) is isinstance(other, QuantizedTensor)
        if isinstance(one, QuantizedTensor):
            assert isinstance(other, QuantizedTensor)
            assert other.device.type == DEVICE
            assert torch.equal(one.packed, other.packed.cpu())
    assert torch.equal(generated(there, DEVICE), expected)
    assert torch.equal(generated(copy.deepcopy(model).to(DEVICE), DEVICE), expected)


def test_weights_are_packed_on_a_worker() -> None:
    """What goes there and back while a model is packed and used is no weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).eval()
    there, x = copy.deepcopy(model), torch.randn(2, 256)
    with torch.inference_mode():
        expected = marid.quantize(model)(x)
    marid.connect(workers=1, first=5)
    try:
        device = f"{DEVICE}:5"
        there.to(device)(x.to(device)).cpu()  # now the weights are there
        with torch.inference_mode(), marid.budget(bytes_up=100_000, bytes_down=100_000):
            found = marid.quantize(there)(x.to(device))
            torch.testing.assert_close(found.cpu(), expected)
    finally:
        marid.disconnect(5, force=True)


def test_layers_that_share_a_weight_share_the_packed_one() -> None:
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64, bias=False), nn.Linear(30, 4), nn.LayerNorm(32))
    model[1].weight = model[0].weight
    marid.quantize(model)
    assert model[0].weight is model[1].weight
    assert isinstance(model[1].weight, QuantizedTensor)
    assert not model[1].weight.requires_grad
    assert type(model[2].weight) is nn.Parameter  # rows of 30 elements are no whole blocks
    assert type(model[3].weight) is nn.Parameter
    marid.quantize(nn.Linear(64, 64))
    with pytest.raises(ValueError, match=r"Sequential has no linear layer whose weight has rows of a multiple of 32"):
        marid.quantize(model)


def test_a_packed_module_is_saved_and_loaded() -> None:
    torch.manual_seed(0)
    layer, other = marid.quantize(nn.Linear(64, 32)), marid.quantize(nn.Linear(64, 32))
    x = torch.randn(2, 64)
    loaded = pickle.loads(pickle.dumps(layer))
    assert torch.equal(loaded(x), layer(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    other.to(DEVICE).load_state_dict(marid.quantize(nn.Linear(64, 32)).state_dict())
    assert not torch.allclose(other(x.to(DEVICE)).cpu(), layer(x), atol=1e-2)


def test_a_write_to_a_packed_matrix_is_refused() -> None:
    """It would be one to a copy of its elements."""
    weight = marid.quantize(nn.Linear(64, 32)).weight
    before = weight.packed.clone()
    with torch.no_grad():
        for write in (
            lambda: weight.mul_(2),
            lambda: weight.copy_(torch.zeros(32, 64)),
            lambda: weight.__setitem__(0, 1),
            lambda: weight.__iadd__(1),
            lambda: nn.init.zeros_(weight),
            lambda: torch.mul(torch.ones(32, 64), 2, out=weight),
            lambda: torch.ops.aten.mul_.Tensor(weight, 2),
            lambda: setattr(weight, "data", torch.zeros(32, 64)),
        ):
            with pytest.raises(RuntimeError, match="cannot write to a packed matrix"):
                write()
    assert torch.equal(weight.packed, before)
    with pytest.raises(RuntimeError, match="cannot write to a packed matrix"):
        marid.quantize(nn.Linear(64, 32)).load_state_dict(nn.Linear(64, 32).state_dict())


@pytest.mark.parametrize("packing", ["Q4_K", "int8"])
def test_packings_that_cannot_be_made_are_refused(packing: str) -> None:
    layer = nn.Linear(256, 4)
    with pytest.raises(ValueError, match=rf"packs as q8_0 or q4_0: '{packing}' (can only be read|is not known)"):
        marid.quantize(layer, packing)
    assert type(layer.weight) is nn.Parameter


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_layers_of_other_types_keep_theirs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 32, dtype=dtype)
    marid.quantize(layer)
    x = torch.randn(3, 64, dtype=dtype)
    found = layer(x)
    assert isinstance(layer.weight, QuantizedTensor)
    expected = F.linear(x.double(), layer.weight.dequantize().double(), layer.bias.double())
    torch.testing.assert_close(found, expected.to(dtype))
    weight = layer.weight
    assert layer.half().bfloat16().double().to(dtype).weight is weight
    assert isinstance(weight, QuantizedTensor)
