"""What the modules of Hugging Face models say is in them, beside what Marid finds in the graphs of their work."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import nn

import marid
from tests.helpers import DEVICE
from tests.models import CASES, Case

__all__ = ["FAMILIES", "KINDS", "Score", "compared", "predicted"]

KINDS = ("attention", "mlp", "gated mlp", "norm", "embedding", "head", "cross entropy")

_VOCAB = 101
"""Not the width of any layer: a head is told by it."""


def _ids(labels: bool) -> dict[str, Any]:
    ids = torch.randint(3, _VOCAB, (2, 7))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {**given, "labels": ids} if labels else given


def _pixels(labels: bool) -> dict[str, Any]:
    pixels = torch.randn(2, 3, 16, 16)
    return {"pixel_values": pixels, "labels": torch.tensor([1, 3])} if labels else {"pixel_values": pixels}


def _text_to_text(labels: bool) -> dict[str, Any]:
    given = {"input_ids": _ids(False)["input_ids"]}
    return {**given, ("labels" if labels else "decoder_input_ids"): torch.randint(3, _VOCAB, (2, 5))}


_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "vocab_size": _VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {"num_key_value_heads": 2, "max_position_embeddings": 64}
_IMAGES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
    "patch_size": 8, "num_labels": 5,
}  # fmt: skip


def _made(name: str, suffix: str, **more: Any) -> Callable[[float], nn.Module]:
    def build(_: float) -> nn.Module:
        config = getattr(hf, f"{name}Config")(**more)
        return getattr(hf, f"{name}{suffix}")(config)

    return build


def _decoder(name: str, **more: Any) -> Case:
    return Case(name.lower(), _made(name, "ForCausalLM", **{**_SIZES, **_GROUPED, **more}), _ids)


def _encoder(name: str, **more: Any) -> Case:
    return Case(name.lower(), _made(name, "ForMaskedLM", **{**_SIZES, "max_position_embeddings": 64, **more}), _ids)


def _images(name: str, **more: Any) -> Case:
    return Case(name.lower(), _made(name, "ForImageClassification", **{**_IMAGES, **more}), _pixels)


_BART: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": _VOCAB, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": _VOCAB, "pad_token_id": 0}
_GPTJ = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64, "vocab_size": _VOCAB}

FAMILIES = {
    case.name: case
    for case in [
        *(case for case in CASES if case.name not in ("resnet",)),
        _decoder("GPTNeoX"),
        _decoder("OPT", ffn_dim=48, word_embed_proj_dim=32),
        _decoder("Bloom"),
        _decoder("Falcon", new_decoder_architecture=False, multi_query=True),
        _decoder("Phi"),
        _decoder("Phi3"),
        _decoder("Gemma2", head_dim=8, query_pre_attn_scalar=8, sliding_window=4),
        _decoder("Olmo2"),
        _decoder("Granite"),
        _decoder("StableLm"),
        _decoder("Starcoder2"),
        _decoder("Glm", head_dim=8),
        Case("gptj", _made("GPTJ", "ForCausalLM", **_GPTJ), _ids),
        _encoder("Roberta"),
        _encoder("Electra", embedding_size=32),
        _encoder("Albert", embedding_size=16),
        _encoder("MPNet"),
        Case("distilbert", _made("DistilBert", "ForMaskedLM", **_DISTIL), _ids),
        Case("bart", _made("Bart", "ForConditionalGeneration", **_BART), _text_to_text),
        Case("pegasus", _made("Pegasus", "ForConditionalGeneration", **_BART), _text_to_text),
        _images("DeiT"),
        _images("Dinov2"),
    ]
}


# --- what the modules say ---------------------------------------------------------------------------------------------

_ATTENTION = re.compile(r"Attention$")
_MLP = re.compile(r"(MLP|Mlp|FeedForward|FFN|DenseActDense|DenseGatedActDense)$")
_PAIRS = [("fc1", "fc2"), ("intermediate", "output"), ("ffn", "ffn_output"), ("lin1", "lin2"), ("wi", "wo")]
_GATES = {"gate_proj", "gate_up_proj", "wi_0", "w12"}


def _kind(module: nn.Module) -> str | None:
    name = type(module).__name__
    children = dict(module.named_children())
    inner = [type(child).__name__ for child in module.modules() if child is not module]
    if _ATTENTION.search(name) and not any(_ATTENTION.search(other) for other in inner):
        return "attention"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if re.search(r"Norm(\dd)?$", name) and not children:
        return "norm"
    if any(_MLP.search(other) for other in inner):
        return None
    if _GATES & children.keys():
        return "gated mlp"
    pair = any(a in children and b in children for a, b in _PAIRS)
    return "mlp" if _MLP.search(name) or pair else None


@contextmanager
def _calls(model: nn.Module) -> Iterator[dict[str, collections.Counter[str]]]:
    """How often modules of each kind are called, by path."""
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    handles = []
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # pyright: ignore[reportCallIssue]
    for path, module in model.named_modules():
        kind = _kind(module)
        if module is head or path in ("classifier", "classifier.out_proj"):
            kind = "head"
        if kind is not None:
            handles.append(module.register_forward_hook(lambda *_, k=kind, p=path: found[k].update([p])))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


# --- what is found --------------------------------------------------------------------------------------------------

_MOVES = {"aten::clone", "aten::_to_copy", "aten::cat", "aten::expand", "aten::where"}


def predicted(graph: marid.ComputationGraph) -> dict[str, list[str]]:
    """The paths of the modules that patterns were found in, by kind."""
    nodes = {node.id: node for node in graph.nodes}
    found: dict[str, list[str]] = collections.defaultdict(list)
    for region in graph.regions.find("pattern"):
        inside = [nodes[index] for index in region.nodes]
        working = [n for n in inside if n.op is not None and not n.op.view and n.operation not in _MOVES]
        inside = working or inside
        chains = [[path for path, _ in node.metadata.modules] for node in inside]
        shared = chains[0]
        for chain in chains[1:]:
            shared = [a for a, b in zip(shared, chain, strict=False) if a == b]
        found[region.name].append(shared[-1] if shared else "")
    return found


@dataclass
class Score:
    """How many of one kind there are, were found, and were found rightly."""

    there: int = 0
    found: int = 0
    right: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def precision(self) -> float:
        """Of what was found, the part that is there."""
        return self.right / self.found if self.found else 1.0

    @property
    def recall(self) -> float:
        """Of what is there, the part that was found."""
        return self.right / self.there if self.there else 1.0


def compared(case: Case, train: bool) -> tuple[dict[str, Score], marid.ComputationGraph]:
    """What modules say, and what was found, of one forward or one training step."""
    torch.manual_seed(1)
    model = case.build(0.0).to(DEVICE).train(train)
    inputs = {k: v.to(DEVICE) if torch.is_tensor(v) else v for k, v in case.inputs(train).items()}
    marid.materialize(*model.parameters(), *model.buffers(), *[v for v in inputs.values() if torch.is_tensor(v)])
    with _calls(model) as calls:
        if train:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            case.loss(model, inputs).backward()
            optimizer.step()
            graph = marid.graph(*model.parameters())
        else:
            with torch.no_grad():
                outputs = model(**inputs)
            graph = marid.graph(*[t for t in _tensors(outputs) if t.device.type == DEVICE])
    found = predicted(graph)
    scores = {}
    for kind in KINDS:
        there = calls[kind]
        if kind == "cross entropy":
            there = collections.Counter({"": (2 if case.name == "clip" else 1) if train else 0})
        score = scores[kind] = Score(sum(there.values()), len(found[kind]))
        left = collections.Counter(there)
        for path in found[kind]:
            fits = [known for known in left if left[known] and (known in ("", path) or path.startswith(f"{known}."))]
            if fits:
                left[max(fits, key=len)] -= 1
                score.right += 1
            else:
                score.wrong.append(f"+{path}")
        score.wrong += [f"-{path}" for path, count in left.items() for _ in range(count)]
    return scores, graph


def _tensors(made: Any) -> list[torch.Tensor]:
    if isinstance(made, torch.Tensor):
        return [made]
    if isinstance(made, dict):
        return [tensor for item in made.values() for tensor in _tensors(item)]
    return [tensor for item in made for tensor in _tensors(item)] if isinstance(made, (list, tuple)) else []
