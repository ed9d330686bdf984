"""Records of operators: what the table says is about operators that exist, and adds to what schemas say."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
import torch.distributed._functional_collectives  # which defines operators that rows name

from marid.ops import autocast_lists, irregular
from marid.ops.facts import Facts, facts_of, named, overload_named

aten = torch.ops.aten
DERIVED = {"name", "written", "shared", "mutates", "shares", "resized", "draws", "takes_generator", "dynamic"}
DERIVED |= {"moves_memory", "is_foreach", "writes_to_out", "of_others", "in_python", "out_overload"}
# Overloads that PyTorch before 2.13 lacks.
NEW = {"aten::rand_like.generator", "aten::randn_like.generator", "aten::randint_like.generator"}


def test_rows_are_of_operators_that_exist() -> None:
    packets = {name: name.partition(".")[0].split("::") for name in irregular.ROWS}
    assert not [name for name, (space, base) in packets.items() if not hasattr(getattr(torch.ops, space), base)]


def test_rows_of_overloads_are_of_overloads_that_exist() -> None:
    assert not [name for name in irregular.ROWS if "." in name and overload_named(name) is None]


def test_rows_say_what_a_record_has() -> None:
    said = {field for row in irregular.ROWS.values() for field in row}
    assert said == {field.name for field in fields(Facts)} - DERIVED


def test_operators_that_rows_name_exist() -> None:
    named_by = {row[field] for row in irregular.ROWS.values() for field in ("in_place_of", "views_as") if field in row}
    assert not [name for name in named_by if overload_named(name) is None and not hasattr(aten, name.split("::")[-1])]


def test_a_fact_is_said_once() -> None:
    with pytest.raises(ValueError, match=r"index has \['mask'\] already"):
        irregular.row("index", mask="written")


def test_a_record_is_made_of_schema_tags_and_row() -> None:
    norm = facts_of(aten.native_batch_norm.default)
    arguments = [argument.name for argument in aten.native_batch_norm.default._schema.arguments]
    assert [name for name, is_so in zip(arguments, norm.written, strict=True) if is_so] == [*norm.writes]
    assert facts_of(aten._unsafe_view.default).view
    assert facts_of(aten._unsafe_view.default).fusion == facts_of(aten.view.default).fusion == "between"
    assert facts_of(aten.add_.Tensor).fusion == "pointwise"
    assert facts_of(aten.add_.Tensor).number == "alpha"
    assert facts_of(aten.nonzero.default).dynamic
    assert not facts_of(aten._scaled_dot_product_flash_attention_for_cpu.default).draws
    assert facts_of(aten.mm.default).kernel == "marid::mm"
    assert facts_of(aten.mm.out).kernel == ""
    assert facts_of(aten.relu.default).out_overload == "out"
    assert facts_of(aten.resize_.default).resized[0]
    assert facts_of(aten.mm.out).writes_to_out
    assert not facts_of(aten.mm.out).keeps_geometry
    assert facts_of(aten.add_.Tensor).keeps_geometry


def test_overloads_that_take_a_generator_draw() -> None:
    for name in named("with_generator"):
        func = overload_named(name)
        general = overload_named(f"{func._schema.name}.{facts_of(func).with_generator}")
        assert general is not None or f"{func._schema.name}.{facts_of(func).with_generator}" in NEW
        assert general is None or facts_of(general).takes_generator


def test_no_operator_is_on_two_lists_of_autocast() -> None:
    for lists in (autocast_lists.CPU, autocast_lists.CUDA):
        names = [name for listed in lists.values() for name in listed]
        assert len(names) == len(set(names))
