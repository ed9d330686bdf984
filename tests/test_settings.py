"""Assignments to ``marid.settings``: what is no setting, or no value of one, is refused where it is assigned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import marid
from marid.settings import Settings


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("cache_dir", "folder", Path("folder")),
        ("cache_dir", Path("folder"), Path("folder")),
        ("compile", 0, False),
        ("print_materialize", None, None),
        ("print_materialize", 1, True),
        ("memory_limit", 1 << 30, 1 << 30),
        ("replay_seconds", 0.5, 0.5),
        ("engine", "cuda:0", "cuda:0"),
    ],
)
def test_values_are_kept_as_what_the_field_is(name: str, value: Any, kept: Any) -> None:
    settings = Settings()
    setattr(settings, name, value)
    assert getattr(settings, name) == kept
    assert type(getattr(settings, name)) is type(kept)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("memory_limit", "2g", "marid.settings.memory_limit must be a number, but is '2g'"),
        ("compile", "yes", "marid.settings.compile must be True or False, but is 'yes'"),
        ("asynchronous", 2, "marid.settings.asynchronous must be True or False, but is 2"),
        ("print_materialize", "", "marid.settings.print_materialize must be True or False, but is ''"),
        ("engine", None, "marid.settings.engine must be text, but is None"),
        ("cache_dir", 1, "marid.settings.cache_dir must be a path, but is 1"),
    ],
)
def test_values_of_another_type_are_refused(name: str, value: Any, said: str) -> None:
    before = getattr(marid.settings, name)
    with pytest.raises(TypeError) as caught:
        setattr(marid.settings, name, value)
    assert str(caught.value) == said
    assert getattr(marid.settings, name) == before


def test_a_name_that_is_no_setting_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"has no field 'memory_limits'; did you mean 'memory_limit'\?"):
        marid.settings.memory_limits = 1  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match=r"has no field 'nonsense_zzz'$"):
        marid.settings.nonsense_zzz = 1  # pyright: ignore[reportAttributeAccessIssue]
