"""What operators on lists return: for each tensor, what another operator returns for one."""

from __future__ import annotations

from typing import Any

from marid.frontend.rules import Rule
from marid.native import module

# For overloads of ``_foreach_x`` with more than a list of tensors: the overload of ``x`` that the CPU takes for each.
_FOR_EACH = {
    **{(x, of): "Tensor" for x in ("add", "sub", "mul", "div") for of in ("List", "Scalar", "ScalarList", "Tensor")},
    **{(x, of): "" for x in ("addcmul", "addcdiv") for of in ("Scalar", "ScalarList")},
    **{("lerp", of): "Tensor" if of == "List" else of for of in ("List", "Scalar")},
    **{(x, "List"): "" for x in ("maximum", "minimum")},
}


def for_each(func: Any) -> Rule | None:
    """The rule of an operator that does for each tensor of a list what another operator does for one; None where there
    is none. PyTorch's stand-ins for these operators are slow, and lay dimensions of size one out otherwise."""
    schema = func._schema
    name, overload = schema.name.removeprefix("aten::_foreach_"), schema.overload_name
    if name == schema.name:
        return None
    alone = not overload and len(schema.arguments) == 1
    of_one = "" if alone else _FOR_EACH.get((name.removesuffix("_"), overload))
    number = -1 if of_one is None else module.derives(f"aten::{name}", of_one)
    if number < 0:
        return None
    writes = not schema.returns

    def derive(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 4:  # after three lists, which is no positional argument of the operator for one
            args, kwargs = args[:3], {"value": args[3]}
        counts = {len(arg) for arg in (*args, *kwargs.values()) if type(arg) is tuple}
        if len(counts) != 1 or 0 in counts:
            return NotImplemented
        results = [_derived_at(index, number, args, kwargs, writes) for index in range(counts.pop())]
        if NotImplemented in results:
            return NotImplemented
        return None if writes else results

    return derive


def _derived_at(index: int, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], writes: bool) -> Any:
    one = tuple([arg[index] if type(arg) is tuple else arg for arg in args])
    named = tuple([(name, arg[index] if type(arg) is tuple else arg) for name, arg in kwargs.items()])
    return module.derive(number, one, named or None, writes)
