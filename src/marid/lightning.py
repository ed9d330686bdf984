"""Importing this adds ``accelerator="marid"`` to Lightning; see ``marid.frameworks``."""

from __future__ import annotations

from marid.frameworks import register_with_lightning

__all__: list[str] = []

register_with_lightning()
