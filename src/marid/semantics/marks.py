"""What users have said about values."""

from __future__ import annotations

import weakref

from marid.graph.node import Value

__all__ = ["marks"]

marks: weakref.WeakKeyDictionary[Value, str] = weakref.WeakKeyDictionary()
"""The roles that were given to tensors, by the value whose operation made their memory."""
