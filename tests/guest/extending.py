"""What people add to PyTorch: operators, autograd functions, hooks, subclasses, modes, dispatch keys, backends."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import nn
from torch.library import Library, custom_op, opcheck
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from tests.guest.common import Small, data, use


@use
def custom_operators() -> Any:
    @custom_op("guest::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    twice.register_autograd(lambda ctx, grad: grad * 2, setup_context=lambda ctx, inputs, output: None)
    x = data(3).requires_grad_()
    twice(x).sum().backward()
    compiled = torch.compile(lambda t: twice(t) + 1, backend="aot_eager", fullgraph=True)
    return x.grad, opcheck(twice, (data(3),)), compiled(data(3))


@use
def custom_operators_without_a_kernel() -> Any:
    @custom_op("guest::cuda_only", mutates_args=(), device_types="cuda")
    def cuda_only(x: torch.Tensor) -> torch.Tensor:
        return x

    try:
        return cuda_only(data(2))
    except NotImplementedError as error:  # (it ends with a list of all dispatch keys that have kernels)
        return str(error).partition("is only available")[0]


@use
def libraries() -> Any:
    defined, seen = Library("guest_library", "DEF"), []
    defined.define("plus(Tensor x, int n) -> Tensor")
    defined.impl("plus", lambda x, n: x + n, "CompositeImplicitAutograd")
    replaced = Library("aten", "IMPL")
    replaced.impl("aten::special_i1e", lambda x: seen.append("ours") or x, "CPU", allow_override=True)
    found = torch.ops.guest_library.plus(data(2), 3), torch.special.i1e(data(2))
    replaced._destroy()
    return found, seen, torch.special.i1e(data(2)), str(torch.ops.guest_library.plus.default._schema)


@use
def kernels_on_the_python_key() -> Any:
    """Of an operator, for a subclass of one's own."""
    kernels, seen = Library("aten", "FRAGMENT"), []

    class Seen(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))

    x = torch.Tensor._make_subclass(Seen, data(2))
    del kernels
    return torch.add(x, 1).tolist(), seen, type(x * 2).__name__


@use
def autograd_functions() -> Any:
    class Cube(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x**3

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            (x,) = ctx.saved_tensors
            return 3 * x**2 * grads[0]

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:
            (x,) = ctx.saved_tensors
            return 3 * x**2 * tangents[0]

    x = data(3).double().requires_grad_()
    checked = torch.autograd.gradcheck(Cube.apply, x), torch.autograd.gradgradcheck(Cube.apply, x)
    mapped = torch.func.vmap(Cube.apply)(data(3, 2))
    return checked, mapped, torch.func.jvp(Cube.apply, (data(2),), (torch.ones(2),))


@use
def saved_tensor_hooks() -> Any:
    packed: list[Any] = []

    def pack(x: torch.Tensor) -> Any:
        packed.append(list(x.shape))
        return x.clone()

    x = data(2, 4).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = Small()(x).sigmoid().sum()
    out.backward()
    with torch.autograd.graph.save_on_cpu(pin_memory=False):
        (x * x).sum().backward()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        try:
            torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x).__enter__()
        except RuntimeError as error:
            return packed, x.grad, str(error)
    return None


@use
def graph_nodes() -> Any:
    x = data(2).requires_grad_()
    y = (x * 2).exp()
    node = y.grad_fn
    assert node is not None
    seen: list[str] = []
    node.register_hook(lambda given, got: seen.append(f"{len(given)} {len(got)}"))
    node.register_prehook(lambda got: seen.append(f"before {len(got)}"))
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append(type(leaf).__name__))
    torch.autograd.graph.register_multi_grad_hook([x, y], lambda grads: seen.append(f"all {len(grads)}"))
    y.sum().backward()
    edge = torch.autograd.graph.get_gradient_edge((x * 3).sum())
    torch.autograd.backward([edge], [torch.ones(())])
    return seen, node.name(), [type(next_).__name__ for next_, _ in node.next_functions], x.grad


@use
def global_hooks() -> Any:
    seen: list[str] = []
    module, optimizer = nn.modules.module, sys.modules["torch.optim.optimizer"]
    handles = [
        module.register_module_forward_hook(lambda m, i, o: seen.append(f"forward {type(m).__name__}")),
        module.register_module_forward_pre_hook(lambda m, i: seen.append(f"before {type(m).__name__}")),
        module.register_module_full_backward_hook(lambda m, i, o: seen.append(f"backward {type(m).__name__}")),
        module.register_module_parameter_registration_hook(lambda m, n, p: seen.append(f"parameter {n}")),
        module.register_module_module_registration_hook(lambda m, n, s: seen.append(f"module {n}")),
        optimizer.register_optimizer_step_pre_hook(lambda o, a, k: seen.append(f"before {type(o).__name__}")),
        optimizer.register_optimizer_step_post_hook(lambda o, a, k: seen.append(f"after {type(o).__name__}")),
    ]
    model = Small()
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    model(data(2, 4).requires_grad_()).sum().backward()
    made.step()
    for handle in handles:
        handle.remove()
    return seen


@use
def function_subclasses() -> Any:
    seen: list[str] = []

    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return super().__torch_function__(func, types, args, kwargs or {})

    x = data(2, 3).as_subclass(Logged)
    values, indices = x.topk(2)
    parts = torch.chunk(x, 2)
    made = nn.Parameter(x)
    return seen, type(values).__name__, type(indices).__name__, type(parts).__name__, type(made).__name__


@use
def functions_that_can_be_overridden() -> Any:
    functions = torch.overrides.get_overridable_functions()
    count = {str(getattr(space, "__name__", space)): len(names) for space, names in functions.items()}
    own = hasattr(torch.Tensor, "is_remote_accelerator")  # and the method that moves a tensor there
    count["Tensor"] -= own
    return count, len(torch.overrides.get_ignored_functions()), len(torch.overrides.get_testing_overrides()) - 2 * own


@use
def modes_within_modes() -> Any:
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(f"{self.name} {func}")
            return func(*args, **(kwargs or {}))

    with Mode("outer"), Mode("inner"), torch.no_grad():
        torch.nn.functional.scaled_dot_product_attention(*[data(1, 1, 2, 4)] * 3)
        data(3, 3).topk(2)
        nn.LSTM(2, 2)(data(2, 1, 2))
    return seen


@use
def trees() -> Any:
    class Pair:
        def __init__(self, first: Any, second: Any) -> None:
            self.first, self.second = first, second

    pytree.register_pytree_node(Pair, lambda p: ([p.first, p.second], None), lambda c, _: Pair(*c))
    leaves, spec = pytree.tree_flatten({"x": Pair(1, (2, [3])), "y": data(4).topk(2), "z": data(4).chunk(2)})
    return len(leaves), spec.num_leaves, type(pytree.tree_unflatten(leaves, spec)["y"]).__name__, str(spec)


@use
def parametrized() -> Any:
    from torch.nn.utils import parametrizations, parametrize, prune, weight_norm

    layer = parametrizations.spectral_norm(parametrizations.weight_norm(nn.Linear(3, 3)))
    pruned = prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)
    old = weight_norm(nn.Linear(3, 3))
    orthogonal = parametrizations.orthogonal(nn.Linear(3, 3))
    parametrize.remove_parametrizations(layer, "weight")
    return [layer(data(2, 3)), pruned(data(2, 4)), old(data(2, 3)), orthogonal(data(2, 3))]


@use
def traceable_subclasses() -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    x = TwoTensor(data(3), data(3) + 1)
    found = is_traceable_wrapper_subclass(x), is_traceable_wrapper_subclass(data(2)), (x * 2).b
    return *found, torch.compile(lambda t: t.sin() + 1, backend="aot_eager")(x).a


@use
def compiler_backends() -> Any:
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        print(end="")
        return x.topk(2)[0] * 2

    found = torch.compile(broken, backend=backend)(data(4))
    explained = torch._dynamo.explain(broken)(data(4))
    return graphs, found, explained.graph_break_count, sorted(torch.compiler.list_backends())


@use
def modules_of_modules() -> Any:
    made = nn.ModuleDict({"a": nn.LazyConv2d(2, 1), "b": nn.ModuleList([Small()])})
    before = [type(p).__name__ for p in made.parameters()]
    made["a"](data(1, 3, 2, 2))
    torch.nn.utils.skip_init(nn.Linear, 2, 2)
    with torch.device("meta"):
        meta = Small()
    filled = meta.to_empty(device="cpu")
    swapped = torch.__future__.get_swap_module_params_on_conversion()
    moved = Small().to(torch.float64).half().float()
    return before, [str(p.device) for p in filled.parameters()], swapped, [str(p.dtype) for p in moved.parameters()]


@use
def weak_references() -> Any:
    x = data(2).requires_grad_()
    reference, ended = weakref.ref(x), []
    weakref.finalize(x, ended.append, 1)
    y = (x * 2).sum()
    del x
    before = reference() is None
    del y
    return before, reference() is None, ended
