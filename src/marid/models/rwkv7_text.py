"""Text with an RWKV-7: what is said to the model, and what it says, word by word."""

from __future__ import annotations

import codecs
import importlib.resources
import time
from collections.abc import Iterator
from typing import Any

import torch

import marid
from marid.models.rwkv7 import RWKV7, State

_MOST_LIKELY = 256
"""Tokens that are drawn from at most: beyond them ``top_p`` finds nothing in what a trained model says."""


def tokenizer() -> Any:
    """The tokenizer of the RWKV world models, from the ``rwkv`` package."""
    try:
        from rwkv.rwkv_tokenizer import TRIE_TOKENIZER  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError("the tokenizer is in the rwkv package: pip install 'marid[rwkv]'") from None
    return TRIE_TOKENIZER(str(importlib.resources.files("rwkv") / "rwkv_vocab_v20230424.txt"))


class Talk:
    """A conversation with a model on a lazy device.

    State and weights stay there: a token is one program, and its number is all that is read. ``temperature`` 0 takes
    the likeliest token each time. Raises ``ValueError`` for a model of other tokens, ``ImportError`` without the
    tokenizer.
    """

    def __init__(self, model: RWKV7, temperature: float = 1.0, top_p: float = 0.7) -> None:
        self.tokens = 0
        """How many tokens the model has said."""
        self.seconds = 0.0
        """How long it took for them, without the prompts."""
        self._model, self._temperature, self._top_p = model, temperature, top_p
        self._words = tokenizer()
        known, largest = model.config.vocabulary, max(self._words.idx2token)
        if known <= largest:
            raise ValueError(f"the model knows {known} tokens, not token {largest} of the world models'")
        self._state: State | None = None
        self._said: int | None = None  # which the model has not read yet
        self._step = marid.compile(self._next)

    def _next(self, token: torch.Tensor, *parts: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        logits, state = self._model(token[:, None], State(*parts))
        return (self._chosen(logits[:, -1]), *map(tuple, state))

    def _chosen(self, logits: torch.Tensor) -> torch.Tensor:
        if self._temperature == 0:
            return logits.argmax(-1)
        likely, tokens = (logits.float() / self._temperature).softmax(-1).topk(min(_MOST_LIKELY, logits.shape[-1]))
        before = likely.cumsum(-1) - likely
        kept = torch.where(before < self._top_p, likely, 0)
        return tokens.gather(-1, torch.multinomial(kept, 1)).squeeze(-1)

    @torch.inference_mode()
    def answer(self, text: str, most: int = 256, until: str | None = None) -> Iterator[str]:
        """Say ``text``; what the model says then, in pieces: ``most`` tokens, or until it ends the text or says
        ``until``, which is not among the pieces."""
        read = ([] if self._said is None else [self._said]) + self._words.encode(text)
        if not read or most < 1:
            return
        device = self._model.head.weight.device
        logits, state = self._model.prefill(torch.tensor([read], device=device), self._state)
        token, parts = self._chosen(logits), tuple(map(tuple, state))
        decoder, waiting = codecs.getincrementaldecoder("utf-8")("replace"), ""
        start = time.perf_counter()
        for count in range(most):
            self._said = int(token.item())
            if count == 0:
                start = time.perf_counter()
            else:
                self.tokens, self.seconds = self.tokens + 1, self.seconds + time.perf_counter() - start
                start = time.perf_counter()
            self._state = State(*parts)
            if self._said == 0:  # the end of the text
                break
            waiting += decoder.decode(self._words.idx2token.get(self._said, b""))
            if until is not None and until in waiting:
                waiting = waiting[: waiting.index(until)]
                break
            ready = len(waiting) - _begun(waiting, until or "")
            if ready:
                yield waiting[:ready]
                waiting = waiting[ready:]
            if count + 1 < most:
                token, *parts = self._step(token, *parts)
        if waiting:
            yield waiting


def _begun(text: str, end: str) -> int:
    """How many characters at the end of a text may be the beginning of ``end``."""
    return next((n for n in range(min(len(text), len(end)), 0, -1) if text.endswith(end[:n])), 0)
