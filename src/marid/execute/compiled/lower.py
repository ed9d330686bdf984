"""From the description of a part to a shared object, by AOTInductor. Runs in the worker process only.

Raises ``Refused`` for what Inductor cannot take or would do differently than the ATen kernels.
"""

from __future__ import annotations

import functools
import operator
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

from marid.built import VECTOR_FLAGS, the_compiler
from marid.execute.compiled.arguments import dtype_named
from marid.execute.compiled.part_graph import PartGraph, Refused, overload_named
from marid.ops.own_operators import OwnOperator, define


def compile_part(description: dict[str, Any], hints: list[int], threads: int) -> tuple[Path, list[Any]]:
    """The shared object, and the conditions on the symbols' values under which it is right, as nested lists."""
    from torch._dynamo.source import ConstantSource
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_aot
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    symbols = [
        shapes.create_symbol(hint, ConstantSource(f"size{index}"), dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        for index, hint in enumerate(hints)
    ]
    sizes = [shapes.create_symintnode(symbol, hint=hint) for symbol, hint in zip(symbols, hints, strict=True)]
    module = _Builder(description, len(sizes)).module()
    with mode:
        examples = [torch.empty_strided(sizes, [0] * len(sizes), device="cpu")] if sizes else []
        examples += [_empty(shape, sizes) for shape in description["inputs"] if shape["base"] < 0]
        examples += [torch.empty((), dtype=dtype_named(name), device="cpu") for name in description["numbers"]]
        with torch.no_grad():
            made = module(*examples)
        _check_results(description, made, sizes)
    config.cpp.threads = threads
    patches = {
        "force_disable_caches": True,
        "aot_inductor.custom_ops_to_c_shims": _products().shims,
        "cpp.vec_isa_ok": _has_vector_unit(),
        "aot_inductor.precompile_headers": False,
        "cpp_cache_precompile_headers": False,
        "aot_inductor.compile_wrapper_opt_level": "O0",
        "aot_inductor.enable_line_tables": False,  # since PyTorch 2.13
        "keep_output_stride": True,
        "compile_threads": 1,
    }
    known = config.get_config_copy()  # pyright: ignore[reportAttributeAccessIssue]
    patches = {name: value for name, value in patches.items() if name in known}
    with torch.no_grad():
        files: Any = compile_fx_aot(module, examples, config_patches=patches)  # pyright: ignore[reportArgumentType]
    path = Path(files if isinstance(files, str) else next(str(f) for f in files if str(f).endswith(".so")))
    source = path.with_suffix(".cpp").read_text()
    if "proxy_executor" in source.partition("::run_impl(")[2].partition("{")[2]:
        raise Refused("it calls an operator that has no C interface")
    return path, _conditions(shapes, symbols)


@functools.cache
def _has_vector_unit() -> bool | None:
    """True where PyTorch's own kernels use AVX2 or AVX-512 and the compiler knows it; None where Inductor has to find
    out. It builds programs against PyTorch's headers for that, which takes some 5 s of a processor in each process."""
    flags = VECTOR_FLAGS.get(torch.backends.cpu.get_cpu_capability())
    compiler = the_compiler()
    if flags is None or compiler is None:
        return None
    known = subprocess.run(
        [compiler, *flags, "-fsyntax-only", "-x", "c++", os.devnull], capture_output=True, check=False
    )
    return True if known.returncode == 0 else None


def _number(value: Any, sizes: list[Any]) -> Any:
    """An integer, or what an expression is with these sizes."""
    if isinstance(value, dict) and "e" in value:
        factor, chosen, offset = value["e"]
        for index in chosen:
            factor = factor * sizes[index]
        return factor + offset
    return value


def _empty(shape: dict[str, Any], sizes: list[Any]) -> torch.Tensor:
    size, stride = ([_number(n, sizes) for n in shape[key]] for key in ("size", "stride"))
    return torch.empty_strided(size, stride, dtype=dtype_named(shape["dtype"]), device="cpu")


def _check_results(description: dict[str, Any], made: Any, sizes: list[Any]) -> None:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    shapes = {r["slot"]: r for i in description["instructions"] for r in i["results"]}
    for slot, tensor in zip(description["outputs"], made, strict=True):
        shape = shapes[slot]
        wanted = [[_number(n, sizes) for n in shape[key]] for key in ("size", "stride")]
        for seen, right in zip((tensor.shape, tensor.stride()), wanted, strict=True):
            if len(seen) != len(right) or not all(
                statically_known_true(a == b) for a, b in zip(seen, right, strict=True)
            ):
                raise Refused(f"a result has another geometry: {list(seen)} in place of {right}")
        if tensor.dtype is not dtype_named(shape["dtype"]):
            raise Refused(f"a result has type {tensor.dtype} in place of {shape['dtype']}")


# --- conditions ----------------------------------------------------------------------------------------------------

_RELATIONS = {
    "Equality": "==",
    "Unequality": "!=",
    "StrictLessThan": "<",
    "LessThan": "<=",
    "StrictGreaterThan": ">",
    "GreaterThan": ">=",
}
_OPERATIONS = {
    "Add": "+", "Mul": "*", "FloorDiv": "//", "CleanDiv": "//", "Mod": "%", "PythonMod": "%",
    "Max": "max", "Min": "min", "And": "and", "Or": "or", "Not": "not",
}  # fmt: skip


def _conditions(shapes: Any, symbols: list[Any]) -> list[Any]:
    """What the trace took for granted of the symbols."""
    if any(symbol in shapes.replacements for symbol in symbols):
        raise Refused("a size that changes was taken for a constant")
    found = [_listed(guard.expr, symbols) for guard in shapes.guards]
    for index, symbol in enumerate(symbols):
        bounds = shapes.var_to_range[symbol]
        found.append([">=", ["symbol", index], max(int(bounds.lower), 2)])
        if bounds.upper.is_number and bounds.upper.is_finite and int(bounds.upper) < 1 << 62:
            found.append(["<=", ["symbol", index], int(bounds.upper)])
    return found


def _listed(expression: Any, symbols: list[Any]) -> Any:
    if expression in symbols:
        return ["symbol", symbols.index(expression)]
    if expression.is_Boolean and expression.args == ():
        return bool(expression)
    if expression.is_Integer:
        return int(expression)
    kind = type(expression).__name__
    name = _RELATIONS.get(kind) or _OPERATIONS.get(kind)
    if kind == "Pow" and expression.args[1].is_Integer and 0 < int(expression.args[1]) <= 4:
        return ["*", *[_listed(expression.args[0], symbols)] * int(expression.args[1])]
    if name is None:
        raise Refused(f"a condition on sizes that cannot be checked: {expression}")
    return [name, *(_listed(argument, symbols) for argument in expression.args)]


# --- products ------------------------------------------------------------------------------------------------------

_PRODUCTS = {  # with the arguments that they may have; as in ops/irregular.py, which is not imported here
    "mm": {"self", "mat2"},
    "bmm": {"self", "mat2"},
    "addmm": {"self", "mat1", "mat2"},
    "linear": {"input", "weight", "bias"},
}
_LEAST = 16  # columns, and rows but for a single one; smaller products are always left to ATen


def _is_product(instruction: dict[str, Any]) -> bool:
    """Whether ``native/gemm/products.cpp`` may have a faster kernel for it."""
    known = _PRODUCTS.get(instruction["op"])
    if known is None or not instruction["args"].keys() <= known:
        return False
    result = instruction["results"][0]
    if result["dtype"] != "float32" or len(result["size"]) < 2:
        return False
    rows, columns = (n if isinstance(n, int) else _LEAST for n in result["size"][-2:])
    return (rows == 1 or rows >= _LEAST) and columns >= _LEAST


class _Products:
    """The operators of ``native/gemm/products.cpp`` as far as tracing needs them, and the C functions for parts."""

    def __init__(self) -> None:
        if not hasattr(torch.ops.marid, "product"):  # as in the worker, which has no C++ half
            tags = (torch.Tag.flexible_layout,)
            add = "product_add(Tensor self, Tensor mat1, Tensor mat2) -> Tensor"
            define(OwnOperator("product(Tensor self, Tensor mat2) -> Tensor", {"Meta": torch.matmul}, tags=tags))
            define(OwnOperator(add, {"Meta": torch.addmm}, tags=tags))
        self.product = torch.ops.marid.product.default
        self.product_add = torch.ops.marid.product_add.default
        handles = "AtenTensorHandle, AtenTensorHandle"
        self.shims = {
            self.product: [f"AOTITorchError aoti_torch_cpu_product({handles}, AtenTensorHandle*)"],
            self.product_add: [f"AOTITorchError aoti_torch_cpu_product_add({handles}, {handles}*)"],
        }


@functools.cache
def _products() -> _Products:
    return _Products()


# --- the graph -----------------------------------------------------------------------------------------------------


class _Builder(PartGraph):
    """Makes the graph module of a description."""

    def __init__(self, description: dict[str, Any], symbol_count: int) -> None:
        super().__init__(description)
        self.sizes: list[Any] = []
        if symbol_count:
            carrier = self.graph.placeholder("sizes")
            self.sizes = [self.call("sym_size", "int", carrier, index) for index in range(symbol_count)]
        inputs = description["inputs"]
        self.add_inputs([index for index, shape in enumerate(inputs) if shape["base"] < 0])
        for index, shape in enumerate(inputs):
            if shape["base"] >= 0:
                size, stride = ([self.whole(n) for n in shape[key]] for key in ("size", "stride"))
                base = self.items[shape["base"]]
                self.items[index] = self.call("as_strided", "default", base, size, stride, self.whole(shape["offset"]))

    def module(self) -> torch.fx.GraphModule:
        self.add_calls()
        return torch.fx.GraphModule(torch.nn.Module(), self.graph)

    def call_of(self, instruction: dict[str, Any], arguments: dict[str, Any]) -> Any:
        if instruction["row"]:
            return self.emit_row(arguments, self.size_of(instruction))
        if _is_product(instruction):
            return self.emit_product(instruction["op"], arguments, self.size_of(instruction))
        return self.emit(instruction["op"], instruction["overload"], arguments, self.lifted(instruction["args"]))

    def size_of(self, instruction: dict[str, Any]) -> list[Any]:
        return [self.whole(n) for n in instruction["results"][0]["size"]]

    def lifted(self, arguments: dict[str, Any]) -> bool:
        return any(
            isinstance(value, dict) and ("number" in value or "numbers" in value) for value in arguments.values()
        )

    def whole(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        item, chosen, offset = value["e"]
        for index in chosen:
            item = self.graph.call_function(operator.mul, (self.sizes[index], item))
        return self.graph.call_function(operator.add, (item, offset)) if offset else item

    def call(self, name: str, overload: str, *args: Any, **kwargs: Any) -> Any:
        return self.graph.call_function(overload_named(name, overload), args, kwargs)

    def emit(self, name: str, overload: str, arguments: dict[str, Any], lifted: bool) -> Any:
        """Call an operator; where it takes a number that is an input, one that takes a tensor there."""
        if name.startswith("_foreach_"):
            return self.emit_each(name, overload, arguments)
        if not lifted or (overload in ("Tensor", "default") and not {"alpha", "value"} & arguments.keys()):
            return self.call_named(name, overload, arguments)
        in_place = name.endswith("_")
        base, given = name.removesuffix("_"), dict(arguments)
        own = given.get("self")
        if base in ("fill", "masked_fill"):
            return self.call_named(name, "Tensor", given)
        if base in ("addcmul", "addcdiv"):
            value = given.pop("value", None)
            product = self.call("mul" if base == "addcmul" else "div", "Tensor", given["tensor1"], given["tensor2"])
            if value is not None:
                product = self.call("mul", "Tensor", product, value)
            made = self.call("add", "Tensor", own, product)
        elif base == "lerp":
            step = self.call("mul", "Tensor", self.call("sub", "Tensor", given["end"], own), given["weight"])
            made = self.call("add", "Tensor", own, step)
        elif "alpha" in given:
            made = self.call(base, "Tensor", own, self.call("mul", "Tensor", given["other"], given["alpha"]))
        elif overload == "Scalar":
            return self.call_named(name, "Tensor", given)
        else:
            return self.call_named(name, overload, given)
        return self.call("copy_", "default", own, made) if in_place else made

    def emit_row(self, arguments: dict[str, Any], size: list[Any]) -> Any:
        """One row times the rows of a matrix, as sums: Inductor shares them out among threads, which BLAS does not."""
        from torch._inductor.inductor_prims import force_stride_order

        if "mat2" in arguments:
            row, matrix = arguments["self"], self.call("t", "default", arguments["mat2"])
        else:
            row, matrix = self.call("reshape", "default", arguments["input"], [1, -1]), arguments["weight"]
        row = self.graph.call_function(force_stride_order, (row, (2, 1)))  # made once, not for each sum
        sums = self.call("sum", "dim_IntList", self.call("mul", "Tensor", row, matrix), [1])
        return self.call("reshape", "default", sums, size)

    def emit_product(self, name: str, arguments: dict[str, Any], size: list[Any]) -> Any:
        """``mm``, ``bmm``, ``addmm`` or ``linear``, by the operators of ``native/gemm/products.cpp``."""
        operators = _products()
        if name != "linear":
            target = operators.product_add if name == "addmm" else operators.product
            return self.graph.call_function(target, tuple(arguments.values()))
        rows = self.call("flatten", "using_ints", arguments["input"], 0, -2)
        given, bias = (rows, self.call("t", "default", arguments["weight"])), arguments.get("bias")
        target, given = (operators.product, given) if bias is None else (operators.product_add, (bias, *given))
        return self.call("reshape", "default", self.graph.call_function(target, given), size)

    def emit_each(self, name: str, overload: str, arguments: dict[str, Any]) -> list[Any]:
        """An operator on lists, element by element."""
        lists = {key: value for key, value in arguments.items() if isinstance(value, list)}
        shared = {key: value for key, value in arguments.items() if key not in lists}
        names = {"scalar": "other", "scalars": "other", "tensors1": "end", "weights": "weight"}
        if "tensor1" in lists:
            names["scalars"] = "value"
        target = name.removeprefix("_foreach_")
        base = target.removesuffix("_")
        to = {"Scalar": "Scalar", "ScalarList": "Scalar", "List": "Tensor", "default": "default"}[overload]
        if base in ("addcmul", "addcdiv", "maximum"):
            to = "default"
        made = []
        for index in range(len(lists["self"])):
            own = {names.get(key, key): value[index] for key, value in lists.items()}
            own |= {names.get(key, key): value for key, value in shared.items()}
            if target == "maximum_":  # which ATen has for lists only
                larger = self.call("maximum", "default", own["self"], own["other"])
                made.append(self.call("copy_", "default", own["self"], larger))
                continue
            lifted = bool({"scalar", "scalars", "value", "weight", "alpha"} & arguments.keys())
            made.append(self.emit(target, to, own, lifted))
        return made
