"""A graph in one spelling: what patterns are matched on, and what patterns are made into.

Views, casts, copies, dropout, and arithmetic with numbers fall away; operators that mean the same have one name;
writes give new values. So ``softmax(q @ k.mT / 8 + mask) @ v`` and its transposed, half-precision,
masked-by-``where`` relatives are all ``matmul(softmax(matmul(q, k)), v)``. What is left is a ``torch.fx.Graph`` whose
nodes are called by name (``call_method``), take tensors only, and know in ``meta["nodes"]`` the recorded nodes that
they stand for. What is computed twice is one node.

Arguments of sums and products come in the order of their names; what is equal in name keeps its order.
"""
# ruff: noqa: ARG002 -- handlers have one signature, and each reads what it needs of it

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import fx

from marid.graph.computation import Recorded
from marid.graph.node import Node, Output, Value, root_of
from marid.semantics.expressions import base_name, gate_of, product_behind, rank

CASTS = {"clone", "_to_copy", "contiguous", "to", "_unsafe_view"}
"""Copies that change a type or a layout only."""

_SAME = {
    "view", "_unsafe_view", "reshape", "clone", "_to_copy", "contiguous", "alias", "detach", "expand", "t", "transpose",
    "permute", "unsqueeze", "squeeze", "flatten", "unflatten", "to", "lift_fresh", "view_as", "expand_as", "numpy_T",
    "movedim", "swapaxes", "native_dropout", "clamp", "clamp_min", "clamp_max", "nan_to_num", "_conj", "resolve_conj",
    "repeat", "repeat_interleave", "roll", "flip", "constant_pad_nd", "mkldnn_reorder", "reflection_pad1d",
    "dropout", "feature_dropout", "_reshape_alias", "diagonal", "unfold", "as_strided", "masked_scatter",
    "_fused_dropout",
}  # fmt: skip
"""What leaves values as they are, so far as patterns go: the first tensor that it takes is what it gives."""
_PARTS = {"slice", "select", "split", "split_with_sizes", "unbind", "chunk", "narrow", "tensor_split", "index_select"}
_ACTIVATIONS = {
    "relu", "gelu", "silu", "hardswish", "mish", "leaky_relu", "elu", "celu", "selu", "softplus", "hardtanh", "relu6",
    "threshold", "hardsigmoid", "prelu", "_prelu_kernel", "log_sigmoid_forward", "rrelu_with_noise",
}  # fmt: skip
_NAMES = {
    "_softmax": "softmax", "_safe_softmax": "softmax", "_log_softmax": "log_softmax", "mean": "mean", "sum": "mean",
    "sub": "sub", "square": "square", "addbmm": "matmul", "bmm": "matmul", "matmul": "matmul", "amax": "max",
    "nll_loss_forward": "nll_loss", "nll_loss2d_forward": "nll_loss", "linalg_vector_norm": "norm", "norm": "norm",
    "convolution": "conv", "_convolution": "conv", "convolution_overrideable": "conv", "mkldnn_convolution": "conv",
    "native_batch_norm": "batch_norm", "_native_batch_norm_legit": "batch_norm",
    "_batch_norm_with_update": "batch_norm",
    "_native_batch_norm_legit_no_training": "batch_norm", "native_group_norm": "group_norm",
    "native_layer_norm": "layer_norm", "_fused_rms_norm": "rms_norm", "argmax": "argmax", "logsumexp": "logsumexp",
}  # fmt: skip
_ONCE = {"sigmoid", "tanh", "exp", "mean", "square", "sub", "var", "sqrt", "rsqrt", "one_minus", "max", "part", "neg"}
"""What is one node however often it is written."""
_COMMUTE = {"add", "mul", "maximum", "minimum"}
_KEEP_STATIC = {"mul", "add", "sub", "div", "sqrt", "rsqrt", "mean", "square", "part", "reciprocal", "one_minus", "var"}
"""Of weights they make weights."""
_FIRST_ONLY = {"batch_norm", "group_norm", "layer_norm", "rms_norm", "nll_loss"}
_GATES = {"sigmoid", "tanh", "erf", "hardsigmoid", "act"}
_SCORES_DEPTH = 12


class Canonical:
    """The canonical graph of operations, in ``graph``.

    ``weight`` says of a value that was not made by them whether layers may multiply by it.
    """

    def __init__(self, recorded: Recorded, operations: Iterable[Node], weight: Callable[[Value], bool]) -> None:
        self.graph = fx.Graph()
        self.recorded = recorded
        self._weight = weight
        self._of: dict[Value, fx.Node] = {}
        self._current: dict[Value, fx.Node] = {}
        self._static: set[fx.Node] = set()
        self._once: dict[Any, fx.Node] = {}
        self.mains: set[Node] = set()
        for node in operations:
            self._add(node)
        for one in reversed(self.graph.nodes):
            if "bypassed" in one.meta and not one.users:
                self.graph.erase_node(one)

    def forget(self) -> None:
        """Let go of what was recorded: graphs of FX are cycles, which nobody may wait for."""
        for node in self.graph.nodes:
            node.meta.clear()

    # --- values -----------------------------------------------------------------------------------------------------

    def value(self, value: Value) -> fx.Node:
        """What stands for a value now, after the writes so far."""
        root = root_of(value)
        written = self._current.get(root)
        if written is not None:
            return written
        found = self._of.get(value)
        if found is None and value is not root:
            found = self._of.get(root)
        if found is None:
            found = self._of[value] = self.graph.placeholder(f"source_{len(self._of)}")
            found.meta.update(nodes=[], value=value, shape=value.spec.shape if value.spec else None)
            if self._weight(root):
                self._static.add(found)
        return found

    def is_weight(self, node: fx.Node) -> bool:
        """Whether it comes from outside, and may be a parameter."""
        return node in self._static

    def _call(self, name: str, args: Sequence[fx.Node], node: Node) -> fx.Node:
        if name in _COMMUTE:
            args = sorted(args, key=rank)
        key = (name, tuple(args), self._numbers(node)) if name in _ONCE else None
        if key in self._once:
            return self._join(self._once[key], node)
        made = self.graph.call_method(name, tuple(args))
        if key is not None:
            self._once[key] = made
        spec = node.spec
        if spec is None and node.outs:
            spec = next((out.spec for ref in node.outs if (out := ref()) is not None), None)
        made.meta.update(nodes=[node], shape=spec.shape if spec is not None else None)
        self.mains.add(node)
        if name in _KEEP_STATIC and args and all(arg in self._static for arg in args):
            self._static.add(made)
        return made

    def _numbers(self, node: Node) -> str:
        """What an operator takes beside tensors."""
        args, kwargs = self.recorded.arguments[node]
        return repr([arg for arg in (*args, *kwargs) if not isinstance(arg, (Node, Output))])

    def _bypass(self, *nodes: Any) -> None:
        """What stood for these stands for them no more, unless somebody else reads them."""
        for node in nodes:
            if isinstance(node, fx.Node) and node.op != "placeholder":
                node.meta["bypassed"] = True

    def _join(self, into: fx.Node, node: Node) -> fx.Node:
        """``node`` belongs to what ``into`` stands for."""
        if into.op != "placeholder":
            into.meta["nodes"].append(node)
            self.mains.add(node)
        return into

    # --- operations -------------------------------------------------------------------------------------------------

    def _add(self, node: Node) -> None:
        if node.op is None or node not in self.recorded.arguments:
            return
        name = base_name(node)
        args, kwargs = self.recorded.arguments[node]
        if name.startswith("foreach_"):
            self._add_foreach(name.removeprefix("foreach_"), node, args, kwargs)
            return
        tensors = [self.value(value) for value in self.recorded.inputs_of(node)]
        if node.outs and not node.op.mutates and name in _PARTS:
            for ref in node.outs:
                if (out := ref()) is not None:
                    self._of[out] = self._part(tensors[0], node, out)
            return
        made = self._made(name, node, tensors, args)
        self._settle(node, made, args)

    def _settle(self, node: Node, made: fx.Node, args: tuple[Any, ...]) -> None:
        if node.op is not None and node.op.mutates and args:
            targets = args[0] if isinstance(args[0], tuple) else (args[0],)
            for target in targets:
                if isinstance(target, (Node, Output)):
                    self._current[root_of(target)] = made
        if node.outs is None:
            self._of[node] = made
        for ref in node.outs or ():
            if (out := ref()) is not None:
                self._of[out] = made
                self._current.pop(out, None)

    def _add_foreach(self, name: str, node: Node, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> None:
        """Operators on lists of tensors are done to the first of each; all others are taken along."""
        every = (*args, *(arg for _, arg in kwargs))
        firsts = [arg[0] if isinstance(arg, tuple) and arg else arg for arg in every]
        tensors = [self.value(arg) for arg in firsts if isinstance(arg, (Node, Output))]
        self._settle(node, self._made(name, node, tensors, tuple(firsts)), args)

    def _part(self, of: fx.Node, node: Node, out: Output | Node) -> fx.Node:
        if of.target in ("softmax", "random") or (out.spec is not None and of.meta.get("shape") == out.spec.shape):
            return of
        made = self._part_of(of, node, out)
        made.meta["shape"] = out.spec.shape if out.spec is not None else None
        return made

    def _part_of(self, of: fx.Node, node: Node, out: Output | Node) -> fx.Node:
        if isinstance(out, Output):  # several of one operator
            made = self.graph.call_method("part", (of,))
            made.meta["nodes"] = [node]
            self.mains.add(node)
            return made
        return self._call("part", (of,), node)

    def _made(self, name: str, node: Node, tensors: list[fx.Node], args: tuple[Any, ...]) -> fx.Node:
        if name.endswith("_like") or name.startswith("new_"):
            tensors = []  # only their sizes are read
        handler = _HANDLERS.get(name)
        if handler is not None:
            made = handler(self, node, tensors, args)
            if made is not None:
                return made
        if name in _SAME and tensors:
            return tensors[0]
        if name in _PARTS and tensors:
            return self._part(tensors[0], node, node)
        if name in _ACTIVATIONS:
            return self._activation(node, tensors[0])
        name = _NAMES.get(name, name)
        return self._call(name, tensors[:1] if name in _FIRST_ONLY else tensors, node)

    def _activation(self, node: Node, of: fx.Node) -> fx.Node:
        return self._join(of, node) if of.target == "act" else self._call("act", (of,), node)

    # --- handlers: None where the operator is as any other ----------------------------------------------------------

    def _mul(self, node: Node, tensors: list[fx.Node], args: tuple[Any, ...]) -> fx.Node | None:
        if len(tensors) == 1:
            return tensors[0]
        a, b = tensors[:2]
        for x, other in ((a, b), (b, a)):
            if other.target == "random":
                return x
            if self._is_number(other, x):
                return self._call("clip", (x, other), node) if other.target in ("reciprocal", "rsqrt") else x
            path = gate_of(other, x) if other.target in _GATES else None
            if path is not None:
                made = self._activation(node, x)
                for gate in path:
                    made.meta["nodes"] += gate.meta["nodes"]
                self._bypass(*path)
                return made
            if other.target == "reciprocal":
                self._bypass(other)
                return self._div(node, [x, other.args[0]], args)  # pyright: ignore[reportArgumentType]
        return self._call("square", (a,), node) if a is b else None

    def _div(self, node: Node, tensors: list[fx.Node], args: tuple[Any, ...]) -> fx.Node | None:
        if len(tensors) == 1:
            is_first = bool(args) and isinstance(args[0], (Node, Output))
            return tensors[0] if is_first else self._reciprocal(node, tensors, args)
        a, b = tensors[:2]
        if self._is_number(b, a):
            return a
        if b.target == "sqrt":
            self._bypass(b)
            return self._call("mul", (a, self._call("rsqrt", b.args[:1], node)), node)  # pyright: ignore[reportArgumentType]
        if a.target == "exp" and b.target == "mean" and b.args[0] is a:
            self._bypass(a, b)
            return self._softmax(node, [a.args[0]], args)  # pyright: ignore[reportArgumentType]
        return self._call("div", (a, b), node)

    def _is_number(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether ``one`` has one element, and the other more."""
        return one.meta.get("shape") == () and other.meta.get("shape") != ()

    def _plus(self, node: Node, tensors: list[fx.Node], args: tuple[Any, ...]) -> fx.Node | None:
        if len(tensors) == 1:
            return tensors[0]
        a, b = tensors[:2]
        for x, other in ((a, b), (b, a)):
            if self._is_number(other, x):
                return x
            width = other.meta.get("shape")
            if x.target in ("linear", "conv", "matmul") and other.op == "placeholder" and width and len(width) == 1:
                return self._join(x, node)  # a bias
        return None

    def _minus(self, node: Node, tensors: list[fx.Node], args: tuple[Any, ...]) -> fx.Node | None:
        if len(tensors) == 1:
            return tensors[0] if base_name(node) == "sub" else self._call("one_minus", tensors, node)
        a, b = tensors[:2]
        if a.target == "mean" and b.target == "square":
            inner, other = a.args[0], b.args[0]
            assert isinstance(inner, fx.Node)
            assert isinstance(other, fx.Node)
            if inner.target == "square" and other.target == "mean" and other.args[0] is inner.args[0]:
                self._bypass(a, b, inner, other)
                return self._call("var", inner.args, node)  # pyright: ignore[reportArgumentType]
        return self._call("sub", (a, b), node)

    def _pow(self, node: Node, tensors: list[fx.Node], args: tuple[Any, ...]) -> fx.Node | None:
        exponent = args[1] if len(args) > 1 else None
        if exponent == 2:
            return self._square(node, tensors, args)
        if exponent in (0.5, -0.5):
            return self._call("sqrt" if exponent > 0 else "rsqrt", tensors, node)
        return tensors[0] if exponent == 1 else None

    def _square(self, node: Node, tensors: list[fx.Node], args: tuple[Any, ...]) -> fx.Node:
        return self._activation(node, tensors[0]) if tensors[0].target == "act" else self._call("square", tensors, node)

    def _mean(self, node: Node, tensors: list[fx.Node], args: tuple[Any, ...]) -> fx.Node | None:
        x = tensors[0]
        if x.target == "square":
            inner = x.args[0]
            if isinstance(inner, fx.Node) and inner.target == "sub":
                base, mean = inner.args
                if isinstance(mean, fx.Node) and mean.target == "mean" and mean.args[0] is base:
                    self._bypass(x, inner, mean)
                    return self._call("var", (base,), node)  # pyright: ignore[reportArgumentType]
        return None

    def _vector_norm(self, node: Node, tensors: list[fx.Node], args: tuple[Any, ...]) -> fx.Node | None:
        if len(args) > 1 and args[1] not in (2, 2.0, None):
            return None
        return self._call("sqrt", (self._call("mean", (self._call("square", tensors, node),), node),), node)

    def _std(self, node: Node, tensors: list[fx.Node], args: tuple[Any, ...]) -> fx.Node:
        return self._call("sqrt", (self._call("var", tensors[:1], node),), node)

    def _var_mean(self, node: Node, tensors: list[fx.Node], args: tuple[Any, ...]) -> fx.Node:
        variance, mean = self._call("var", tensors[:1], node), self._call("mean", tensors[:1], node)
        for ref in node.outs or ():
            if (out := ref()) is not None and out.path == (1,):
                self._of[out] = mean
        return variance

    def _reciprocal(self, node: Node, tensors: list[fx.Node], args: tuple[Any, ...]) -> fx.Node:
        x = tensors[0]
        if x.target == "sqrt":
            self._bypass(x)
            return self._call("rsqrt", x.args[:1], node)  # pyright: ignore[reportArgumentType]
        return self._call("reciprocal", tensors, node)

    def _linear(self, node: Node, tensors: list[fx.Node], args: tuple[Any, ...]) -> fx.Node:
        name = base_name(node)
        if name in ("addmm", "baddbmm", "addmv"):
            tensors = tensors[1:]
        a, b = tensors[:2]
        if (
            name in ("linear", "linear_activation", "fast_linear", "quantized_linear", "mkldnn_linear")
            or b in self._static
        ):
            made = self._call("linear", (a, b), node)
        elif a in self._static:
            made = self._call("linear", (b, a), node)
        else:
            first = b.target == "softmax" and a.target != "softmax"
            return self._call("matmul", (b, a) if first else (a, b), node)
        return self._call("act", (made,), node) if name == "linear_activation" else made

    def _convolve(self, node: Node, tensors: list[fx.Node], args: tuple[Any, ...]) -> fx.Node:
        return self._call("conv", tensors[:2], node)

    def _softmax(self, node: Node, tensors: list[fx.Node], args: tuple[Any, ...]) -> fx.Node:
        """Softmax of what was multiplied, with masks, biases and caps in between taken along."""
        between: list[fx.Node] = []
        product = product_behind(tensors[0], between, _SCORES_DEPTH)
        if product is None:
            return self._call("softmax", tensors[:1], node)
        made = self._call("softmax", (product,), node)
        for one in between:
            made.meta["nodes"] += one.meta["nodes"]
        self._bypass(*between, *(arg for one in between for arg in one.all_input_nodes if arg.target == "max"))
        made.meta["between"] = between
        return made

    def _copy(self, node: Node, tensors: list[fx.Node], args: tuple[Any, ...]) -> fx.Node:
        target = args[0]
        whole = not isinstance(target, (Node, Output)) or target.root is None
        if len(tensors) < 2 or (whole and tensors[0].op != "placeholder"):
            return tensors[-1]  # all of it, and what was there is nobody's
        return self._call("write", tensors[:2], node)

    def _random(self, node: Node, tensors: list[fx.Node], args: tuple[Any, ...]) -> fx.Node:
        return self._call("random", (), node)

    def _cat(self, node: Node, tensors: list[fx.Node], args: tuple[Any, ...]) -> fx.Node | None:
        if len(tensors) == 1:
            return tensors[0]
        first = tensors[0]
        empty = first.meta.get("shape") == (0,)
        if len(tensors) == 2 and (empty or first.op == "placeholder" or first.target == "grow"):
            return self._call("grow", tensors, node)
        return None


Handler = Callable[[Canonical, Node, list[fx.Node], tuple[Any, ...]], "fx.Node | None"]
_HANDLERS: dict[str, Handler] = {
    "mul": Canonical._mul, "div": Canonical._div, "add": Canonical._plus, "sub": Canonical._minus,
    "rsub": Canonical._minus, "pow": Canonical._pow, "square": Canonical._square, "mean": Canonical._mean,
    "sum": Canonical._mean, "linalg_vector_norm": Canonical._vector_norm, "norm": Canonical._vector_norm,
    "std": Canonical._std, "var_mean": Canonical._var_mean, "reciprocal": Canonical._reciprocal,
    "mm": Canonical._linear, "addmm": Canonical._linear, "bmm": Canonical._linear, "baddbmm": Canonical._linear,
    "linear": Canonical._linear, "linear_activation": Canonical._linear, "fast_linear": Canonical._linear,
    "quantized_linear": Canonical._linear, "mkldnn_linear": Canonical._linear, "mv": Canonical._linear,
    "addmv": Canonical._linear, "matmul": Canonical._linear,
    "convolution": Canonical._convolve, "_convolution": Canonical._convolve, "mkldnn_convolution": Canonical._convolve,
    "convolution_overrideable": Canonical._convolve,
    "_softmax": Canonical._softmax, "_safe_softmax": Canonical._softmax, "softmax": Canonical._softmax,
    "copy": Canonical._copy, "bernoulli": Canonical._random, "cat": Canonical._cat,
}  # fmt: skip
