"""A GPT: training steps, forward passes of many batch sizes, and what they hold in memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAZY = {"marid", "marid.compile"}
HEAD = 32
RATE, DECAY, BETAS, EPSILON = 1e-3, 0.01, (0.9, 0.999), 1e-8  # AdamW's defaults


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project_in, self.project_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, width // HEAD, HEAD).transpose(1, 2)
            for part in self.project_in(self.attention_norm(x)).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.feed_norm(x))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, text: Tensor) -> Tensor:
        return F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def prepare(lab: Any) -> None:
    if lab.peer in LAZY:
        marid = lab.marid()
        if lab.peer == "marid.compile" and not hasattr(marid, "compile"):
            raise ModuleNotFoundError("this version of Marid has no marid.compile")


def build(lab: Any) -> Callable[[], Any]:
    makers = {"train": train, "train-unread": train_unread, "shapes": shapes, "memory": memory}
    return makers[lab.options["task"]](lab)


def _device(lab: Any) -> str:
    return "remote_accelerator" if lab.peer in LAZY else "cpu"


def _model(lab: Any) -> tuple[GPT, list[Tensor]]:
    """The model, and batches of random text; the same for every peer."""
    size = lab.options
    torch.manual_seed(0)
    model = GPT(size["layers"], size["width"], size["length"], size["vocabulary"])
    shape = size["batch"], size["length"] + 1
    texts = [torch.randint(size["vocabulary"], shape) for _ in range(8)]
    return model.to(_device(lab)), [text.to(_device(lab)) for text in texts]


# --- training --------------------------------------------------------------------------------------------------------


def _training(lab: Any) -> Callable[[], Tensor]:
    """One step of AdamW on the next batch; the loss as a tensor."""
    model, texts = _model(lab)
    if lab.peer == "torch.compile whole step":
        return _whole_step(model, texts)
    fused = lab.peer == "eager, fused AdamW"
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, fused=True if fused else None)
    loss_of: Callable[[Tensor], Tensor] = model.loss
    if lab.peer == "torch.compile":
        loss_of = torch.compile(model.loss)

    def step(text: Tensor) -> Tensor:
        loss = loss_of(text)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    if lab.peer == "marid.compile":
        import marid

        step = marid.compile(step)
    return _on_next(step, texts)


def _on_next(step: Callable[[Tensor], Tensor], texts: list[Tensor]) -> Callable[[], Tensor]:
    calls = 0

    def call() -> Tensor:
        nonlocal calls
        calls += 1
        return step(texts[calls % len(texts)])

    return call


def _whole_step(model: GPT, texts: list[Tensor]) -> Callable[[], Tensor]:
    """Forward, backward and AdamW as one function of PyTorch's compiler: what can be reached by hand."""
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    first = {name: torch.zeros_like(p) for name, p in params.items()}
    second = {name: torch.zeros_like(p) for name, p in params.items()}
    beta1, beta2 = BETAS
    count = torch.zeros(())

    def loss_of(params: dict[str, Tensor], text: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, params, (text[:, :-1],))
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    @torch.no_grad()
    def step(text: Tensor) -> Tensor:
        grads, loss = torch.func.grad_and_value(loss_of)(params, text)
        count.add_(1)
        for name, p in params.items():
            first[name].lerp_(grads[name], 1 - beta1)
            second[name].mul_(beta2).addcmul_(grads[name], grads[name], value=1 - beta2)
            root = (second[name] / (1 - beta2**count)).sqrt() + EPSILON
            p.mul_(1 - RATE * DECAY).sub_(RATE * (first[name] / (1 - beta1**count)) / root)
        return loss

    return _on_next(torch.compile(step), texts)


def train(lab: Any) -> Callable[[], float]:
    """The loss is read at each step."""
    step = _training(lab)
    return lambda: step().item()


def train_unread(lab: Any) -> Callable[[], Any]:
    """Several steps, and only the last loss is read; the time is that of one step."""
    step, steps = _training(lab), lab.options["steps"]

    def call() -> Any:
        started = time.perf_counter()
        for _ in range(steps - 1):
            step()
        loss = step().item()
        return lab.timed(loss, (time.perf_counter() - started) / steps)

    return call


# --- many batch sizes ------------------------------------------------------------------------------------------------


def shapes(lab: Any) -> Callable[[], list[float]]:
    """One pass: a forward for every batch size, in a new random order each time; a number is read from each."""
    model, _ = _model(lab)
    size, order = lab.options, random.Random(0)
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(size["vocabulary"], (size["batch"], size["length"]), generator=generator)
    text = text.to(_device(lab))
    forward: Callable[[Tensor], Tensor] = model
    if lab.peer == "torch.compile":
        forward = torch.compile(model)
    elif lab.peer == "marid.compile":
        import marid

        forward = marid.compile(model, dynamic_dims={0: [0]}) if size.get("dynamic_dims") else marid.compile(model)

    def call() -> list[float]:
        batches = list(range(1, size["batch"] + 1))
        order.shuffle(batches)
        seen = {}
        with torch.no_grad():
            for batch in batches:
                logits = forward(text[:batch])
                seen[batch] = logits.square().mean().item()
        return [seen[batch] for batch in sorted(seen)]

    if lab.peer == "torch.compile":
        lab.at_end.append(lambda: lab.facts.update(compiles=_compiles()))
    return call


def _compiles() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


# --- memory ----------------------------------------------------------------------------------------------------------


def memory(lab: Any) -> Callable[[], float]:
    """Training steps; at the end, beside what is resident, the bytes of tensors that live at once in a step."""
    step = train(lab)
    if lab.peer not in LAZY:
        lab.at_end.append(lambda: lab.facts.update(live_peak=_live_peak(step)))
    return step


def _live_peak(step: Callable[[], float]) -> int:
    """The most bytes that PyTorch's allocator had handed out during a step, the model and its state included."""
    import gc
    import json
    import tempfile

    gc.collect()
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in gc.get_objects() if _is_dense(t)}
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    live = peak = 0
    for event in sorted(changes, key=lambda event: event["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return sum(held.values()) + peak


def _is_dense(item: Any) -> bool:
    # By exact type: what compilers leave behind are subclasses without memory.
    return type(item) in (Tensor, nn.Parameter) and item.layout is torch.strided and item.device.type == "cpu"
