"""RWKV-7 as a model: it is BlinkDL's, on both devices; states, batches of several lengths, chunks, files, training."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import marid
from marid.models.rwkv7 import RWKV7, Config, State
from marid.models.rwkv7_files import from_blinkdl, load, to_blinkdl
from tests.helpers import DEVICE, on_both

CONFIG = Config(layers=3, width=128, vocabulary=300, hidden=256, ranks=(32, 24, 16, 40))


def random_model(config: Config = CONFIG) -> RWKV7:
    """A model in which everything matters: no parameter is zero."""
    torch.manual_seed(5)
    model = RWKV7(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            wide = parameter.dim() == 2 and "mix" not in name and "r_k" not in name
            noise = torch.randn_like(parameter) * (0.5 / parameter.shape[-1] ** 0.5 if wide else 0.3)
            parameter.copy_(noise + (1 if "norm.weight" in name else 0))
    return model


def blinkdl(model: RWKV7) -> dict[str, Tensor]:
    """BlinkDL's files also have parts of the first layer that are not used."""
    return {**to_blinkdl(model), **{f"blocks.0.att.v{i}": torch.zeros(1, 1) for i in range(3)}}


def step_by_step(tensors: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """BlinkDL's ``forward_one``, written out in loops, in float64; the logits of every token."""
    z = {name: tensor.double().squeeze() for name, tensor in tensors.items()}
    layers = 1 + max(int(name.split(".")[1]) for name in z if name.startswith("blocks."))
    (heads, size), width = z["blocks.0.att.r_k"].shape, z["emb.weight"].shape[1]
    before: dict[str, Tensor] = {}
    memory = [torch.zeros(heads, size, size, dtype=torch.float64) for _ in range(layers)]
    found = []
    for token in tokens:
        x = F.layer_norm(z["emb.weight"][token], (width,), z["blocks.0.ln0.weight"], z["blocks.0.ln0.bias"])
        first = torch.zeros(())
        for i in range(layers):
            p = {name.removeprefix(f"blocks.{i}."): tensor for name, tensor in z.items() if f"blocks.{i}." in name}
            y = F.layer_norm(x, (width,), p["ln1.weight"], p["ln1.bias"])
            old = before.get(f"{i} time", torch.zeros_like(y)) - y
            r, w, k, v, a, g = (y + old * p[f"att.x_{name}"] for name in "rwkvag")
            before[f"{i} time"] = y
            gate = torch.sigmoid(g @ p["att.g1"]) @ p["att.g2"]
            rate = torch.sigmoid(p["att.a0"] + a @ p["att.a1"] @ p["att.a2"])
            decay = torch.exp(-0.6065306597 * torch.sigmoid(p["att.w0"] + torch.tanh(w @ p["att.w1"]) @ p["att.w2"]))
            share = torch.sigmoid(p["att.v0"] + v @ p["att.v1"] @ p["att.v2"]) if i else 0
            r, k, v = (t @ p[f"att.{name}.weight"].t() for t, name in ((r, "receptance"), (k, "key"), (v, "value")))
            kk = F.normalize((k * p["att.k_k"]).view(heads, size), dim=-1)
            k = k * (1 + (rate - 1) * p["att.k_a"])
            first = v if i == 0 else first
            v = v + (first - v) * share
            k, v, r, rate, decay = (t.view(heads, size) for t in (k, v, r, rate, decay))
            out = []
            for h in range(heads):
                removed = memory[i][h] @ torch.outer(-kk[h], kk[h] * rate[h])
                memory[i][h] = memory[i][h] * decay[h] + removed + torch.outer(v[h], k[h])
                out.append(memory[i][h] @ r[h])
            y = F.group_norm(torch.cat(out)[None], heads, p["att.ln_x.weight"], p["att.ln_x.bias"], 64e-5)[0]
            y = y + ((r * k * p["att.r_k"]).sum(-1, keepdim=True) * v).flatten()
            x = x + (y * gate) @ p["att.output.weight"].t()
            y = F.layer_norm(x, (width,), p["ln2.weight"], p["ln2.bias"])
            mixed = y + (before.get(f"{i} channel", torch.zeros_like(y)) - y) * p["ffn.x_k"]
            before[f"{i} channel"] = y
            x = x + torch.relu(mixed @ p["ffn.key.weight"].t()) ** 2 @ p["ffn.value.weight"].t()
        found.append(F.layer_norm(x, (width,), z["ln_out.weight"], z["ln_out.bias"]) @ z["head.weight"].t())
    return torch.stack(found)


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_it_is_blinkdls_model(device: str) -> None:
    """Token by token, all at once, and in chunks."""
    model = random_model()
    tokens = torch.randint(300, (1, 45))
    expected = step_by_step(blinkdl(model), tokens[0].tolist())
    with torch.inference_mode():
        model, tokens = model.to(device), tokens.to(device)
        logits, state = model(tokens)
        torch.testing.assert_close(logits[0].cpu().double(), expected, rtol=1e-4, atol=1e-4)
        last, after = model.prefill(tokens, chunk=7)
        torch.testing.assert_close(last[0].cpu().double(), expected[-1], rtol=1e-4, atol=1e-4)
        for one, other in zip(after.memory, state.memory, strict=True):
            torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-4, atol=1e-4)
        state = None
        for t in range(5):
            logits, state = model(tokens[:, t : t + 1], state)
            torch.testing.assert_close(logits[0, 0].cpu().double(), expected[t], rtol=1e-4, atol=1e-4)


def test_it_is_the_rwkv_packages_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rwkv")
    monkeypatch.setenv("RWKV_V7_ON", "1")
    monkeypatch.setenv("RWKV_JIT_ON", "0")
    # The package sets flags of cuDNN when it is imported, which PyTorch's own test helpers forbid to all after them.
    allowed = torch.backends.__allow_nonbracketed_mutation  # pyright: ignore[reportAttributeAccessIssue]
    with contextlib.redirect_stdout(io.StringIO()), allowed():
        from rwkv.model import RWKV  # pyright: ignore[reportMissingImports]

        model = random_model()
        torch.save(blinkdl(model), tmp_path / "model.pth")
        peer = RWKV(os.fspath(tmp_path / "model"), strategy="cpu fp32")
    tokens = torch.randint(300, (33,))
    expected, _ = peer.forward(tokens.tolist(), None, full_output=True)
    with torch.inference_mode():
        logits, _ = load(tmp_path / "model.pth")(tokens[None])
    torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_sequences_of_different_lengths(device: str) -> None:
    """Each is as it is alone, in whatever chunks; a sequence can pause; states can be chosen and put together."""
    model = random_model().to(device)
    lengths = [19, 3, 8, 1]
    tokens = torch.randint(300, (4, 19)).to(device)
    with torch.inference_mode():
        several, state = model.prefill(tokens, lengths=torch.tensor(lengths, device=device), chunk=8)
        alone = [model.prefill(tokens[i : i + 1, :n]) for i, n in enumerate(lengths)]
        for i, (logits, own) in enumerate(alone):
            torch.testing.assert_close(several[i].cpu(), logits[0].cpu(), rtol=1e-4, atol=1e-5)
            chosen = state.select(i)
            for part, other in zip(chosen, own, strict=True):
                for one, another in zip(part, other, strict=True):
                    torch.testing.assert_close(one.cpu(), another.cpu(), rtol=1e-4, atol=1e-5)
        together = State.together(*[own for _, own in alone])
        assert together.batch == 4
        following = torch.tensor([[1], [2], [3], [4]], device=device)
        active = torch.tensor([1, 0, 1, 1], device=device)
        logits, after = model(following, together, active)
        again, _ = model(following, state, active)
        torch.testing.assert_close(logits[0].cpu(), again[0].cpu(), rtol=1e-4, atol=1e-5)
        for one, other in zip(after.select(1).memory, together.select(1).memory, strict=True):
            assert torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_types(dtype: torch.dtype) -> None:
    """Weights of every type; the memory is float32 at least."""
    model = random_model()
    tokens = torch.randint(300, (2, 20))
    expected, _ = model(tokens)
    found, state = model.to(dtype)(tokens)
    assert found.dtype is dtype
    assert state.memory[0].dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    torch.testing.assert_close(found.float(), expected, rtol=0.1, atol=0.1)


def test_files(tmp_path: Path) -> None:
    """BlinkDL's file and safetensors give the model back, on either device, in another type if asked."""
    from safetensors.torch import save_file

    model = random_model()
    tensors = blinkdl(model)
    torch.save(tensors, tmp_path / "model.pth")
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("model.pth", "model.safetensors"):
        for device in ("cpu", DEVICE):
            read = load(tmp_path / name, device)
            assert read.config == model.config
            for (key, one), (other_key, other) in zip(read.named_parameters(), model.named_parameters(), strict=True):
                assert key == other_key
                assert one.device.type == device
                assert torch.equal(one.cpu(), other)
    told: list[Any] = []
    assert (
        load(tmp_path / "model.pth", dtype=torch.bfloat16, seen=lambda *n: told.append(n)).head.weight.dtype
        is torch.bfloat16
    )
    assert told[-1] == (len(tensors), len(tensors))


def test_what_is_no_model(tmp_path: Path) -> None:
    """A clear error, and nothing is run from a file."""
    tensors = blinkdl(random_model())
    for change in (
        {"emb.weight": torch.zeros(3)},
        {"blocks.0.att.r_k": torch.zeros(7, 64)},
        {"blocks.1.ffn.key.weight": torch.zeros(5, 5)},
        {"blocks.0.ffn.value.weight": tensors["blocks.0.ffn.value.weight"].t()},
        {"blocks.99.ffn.key.weight": torch.zeros(5, 5)},
    ):
        with pytest.raises(ValueError):
            from_blinkdl({**tensors, **change})
    with pytest.raises(ValueError, match=r"no tensor 'head\.weight'"):
        from_blinkdl({name: tensor for name, tensor in tensors.items() if name != "head.weight"})
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"neither a \.pth"):
        load(tmp_path / "model.bin")
    torch.save([1], tmp_path / "list.pth")
    with pytest.raises(ValueError, match="no tensors by names"):
        load(tmp_path / "list.pth")
    torch.save({1: torch.zeros(2)}, tmp_path / "numbers.pth")
    with pytest.raises(ValueError, match="no tensors by names"):
        load(tmp_path / "numbers.pth")
    with pytest.raises(ValueError, match=r"torch\.int64"):
        from_blinkdl({**tensors, "head.weight": tensors["head.weight"].long()})
    torch.save(tensors, tmp_path / "whole.pth")
    whole = (tmp_path / "whole.pth").read_bytes()
    for name, content in (("part.pth", whole[: len(whole) // 2]), ("empty.pth", b""), ("part.safetensors", whole[:99])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="or not all of it"):
            load(tmp_path / name)
    torch.save({"emb.weight": Path}, tmp_path / "code.pth")
    with pytest.raises(ValueError, match=r"weights_only|Unsupported"):
        load(tmp_path / "code.pth")


def test_training() -> None:
    """A small model learns a text by heart, on the device as on the CPU."""

    def trained(device: str) -> list[float]:
        torch.manual_seed(0)
        model = RWKV7(Config(layers=2, width=64, vocabulary=20, hidden=128, ranks=(8, 8, 8, 16))).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        text = torch.randint(20, (2, 25)).to(device)
        losses = []
        for _ in range(30):
            logits, _ = model(text[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    expected, found = trained("cpu"), trained(DEVICE)
    assert expected[-1] < 0.5 * expected[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=1e-3)


def test_a_decoded_token_is_one_program() -> None:
    """Nothing runs in between, nothing is built again, and the device gives the CPU's numbers."""
    model = random_model()

    def decoded(device: str) -> Tensor:
        on_device = random_model().to(device)
        with torch.inference_mode():
            logits, state = on_device.prefill(torch.arange(10, device=device)[None])
            for _ in range(6):
                token = logits.argmax(-1)
                token.tolist()
                logits, state = on_device(token[:, None], state)
                logits = logits[:, -1]
            return logits.clone()

    with torch.inference_mode():
        on_both(decoded)
    del model
    before = marid.stats()
    assert not before.fallbacks
    assert not before.mispredictions


def test_on_a_worker() -> None:
    """Weights and state stay there: a token costs bytes."""
    tokens = torch.randint(300, (1, 12))

    def decoded(device: str) -> None:
        model = random_model()
        expected, _ = model.prefill(tokens)
        there = model.to(device)
        logits, state = there.prefill(tokens.to(device))
        torch.testing.assert_close(logits.cpu(), expected, rtol=1e-4, atol=1e-5)
        for _ in range(3):
            token = logits.argmax(-1)
            token.tolist()
            logits, state = there(token[:, None], state)
            logits = logits[:, -1]
        with marid.budget(bytes_down=4096, bytes_up=65536):
            logits.argmax(-1).tolist()

    marid.connect(workers=1, first=5)
    try:
        with torch.inference_mode():
            decoded(f"{DEVICE}:5")
    finally:
        marid.disconnect(5)
