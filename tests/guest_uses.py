"""What people do with PyTorch, none of it with Marid: run as a script that prints what each of these gives.

The first argument says what of Marid the process has: ``plain``, ``imported``, or ``used`` for one tensor of the
device; the second where to write. ``test_guest.py`` compares.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

if sys.argv[1:2] and sys.argv[1] != "plain":
    import marid  # noqa: F401

    if sys.argv[1] == "used":
        torch.ones(2, device="remote_accelerator").add(1).tolist()

USES: dict[str, Callable[[], Any]] = {}


def use(function: Callable[[], Any]) -> Callable[[], Any]:
    USES[function.__name__] = function
    return function


def told(thing: Any) -> Any:
    """Something that can be compared, of tensors with their types and values."""
    if isinstance(thing, torch.Tensor):
        return [type(thing).__name__, str(thing.dtype), list(thing.shape), thing.detach().flatten().tolist()]
    if isinstance(thing, dict):
        return {str(name): told(value) for name, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [type(thing).__name__, *map(told, thing)]
    if isinstance(thing, (bool, int, float, str, type(None))):
        return thing
    return repr(thing)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(x)))


def data(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) / 10


# --- programs of tensors ---------------------------------------------------------------------------------------------


def several(x: torch.Tensor) -> torch.Tensor:
    values, indices = torch.topk(x, 2)
    first, second = torch.chunk(x, 2)
    ordered = torch.sort(x)[0]
    return values.sum() + indices.sum() + (first * second).sum() + ordered[0].sum()


@use
def script() -> Any:
    scripted = torch.jit.script(several)
    return scripted(data(4, 4)), scripted.code


@use
def script_module() -> Any:
    return torch.jit.script(Small())(data(2, 4))


@use
def trace() -> Any:
    return torch.jit.trace(several, (data(4, 4),))(data(4, 4) + 1)


@use
def scripted_file() -> Any:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(Small()), file)
    file.seek(0)
    return torch.jit.load(file)(data(2, 4))


@use
def export_strict() -> Any:
    return str(torch.export.export(Small(), (data(2, 4),), strict=True).graph)


@use
def export_not_strict() -> Any:
    program = torch.export.export(Small(), (data(2, 4),), strict=False)
    return str(program.graph), program.module()(data(2, 4))


@use
def fx() -> Any:
    traced = torch.fx.symbolic_trace(Small())
    return traced.code, traced(data(2, 4)), str(torch.fx.symbolic_trace(several).graph)


@use
def compile_eager() -> Any:
    compiled = torch.compile(Small(), backend="eager", fullgraph=True)
    return compiled(data(2, 4)), torch.compile(several, backend="eager")(data(4, 4))


@use
def compile_aot_eager() -> Any:
    model = Small()
    torch.compile(model, backend="aot_eager")(data(2, 4)).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@use
def make_fx() -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    return str(make_fx(several)(data(4, 4)).graph), str(make_fx(several, tracing_mode="fake")(data(4, 4)).graph)


@use
def fake_tensors() -> Any:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        x = Small()(torch.empty(2, 4))
        return type(x).__name__, list(x.shape), str(x.device)


@use
def functorch() -> Any:
    model = Small()
    parameters = dict(model.named_parameters())

    def loss(given: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, given, (x,)).sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, data(3, 1, 4))
    forward = torch.func.jvp(torch.sin, (data(3),), (torch.ones(3),))
    q = data(2, 1, 3, 4)
    attention = torch.func.vmap(lambda x: F.scaled_dot_product_attention(x, x, x))(q[None].expand(2, -1, -1, -1, -1))
    return per_sample, forward, torch.func.hessian(lambda x: (x**3).sum())(data(2)), attention


@use
def attention_under_vmap() -> Any:
    q = torch.randn(2, 2, 3, 8, requires_grad=True)
    out = torch.func.vmap(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True))(q)
    out.sum().backward()
    return out, q.grad


# --- Python around tensors -------------------------------------------------------------------------------------------


@use
def pickling() -> Any:
    functions = [torch.topk, torch.chunk, torch.sort, torch.unbind, torch.set_num_threads, F.linear]
    back = [pickle.loads(pickle.dumps(function)) is function for function in functions]
    model = pickle.loads(pickle.dumps(Small()))
    file = io.BytesIO()
    torch.save({"x": data(2), "model": model.state_dict()}, file)
    file.seek(0)
    return back, model(data(1, 4)), torch.load(file, weights_only=True)


@use
def names_of_functions() -> Any:
    functions = [torch.topk, torch.chunk, torch.Tensor.add, torch.nn.functional.softmax, torch.Tensor.split]
    return [resolve_name(function) for function in functions]


@use
def function_modes() -> Any:
    seen: list[Any] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((resolve_name(func), func is torch.topk, func is torch.chunk, len(types)))
            return func(*args, **(kwargs or {}))

    with Mode():
        several(data(4, 4))
    return seen


@use
def dispatch_modes() -> Any:
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        Small()(data(2, 4)).sum().backward()
    return seen


class Wrapped(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils._pytree import tree_map_only

        CALLS.append(str(func))
        out = func(*tree_map_only(Wrapped, lambda t: t.inner, args), **(kwargs or {}))
        return tree_map_only(torch.Tensor, Wrapped, out)


CALLS: list[str] = []


@use
def subclasses() -> Any:
    class Plain(torch.Tensor):
        pass

    CALLS.clear()
    x = Wrapped(data(4, 4))
    out = (x @ x.t() + 1).relu().split(2)[0].inner
    plain = data(3).as_subclass(Plain)
    return CALLS, out, type(plain + 1).__name__, type(plain.topk(2)).__name__


@use
def copies() -> Any:
    model = Small()
    twin = copy.deepcopy(model)
    lazy = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    copied = copy.deepcopy(lazy)
    return [torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)], lazy(
        data(3, 4)
    ).shape == copied(data(3, 4)).shape


@use
def attributes() -> Any:
    """Of what one could have replaced: names, modules, texts."""
    things = [
        *(torch.topk, torch.set_num_threads, torch._C._set_default_dtype, nn.Module.__call__, nn.Module._apply),
        *(nn.TransformerEncoder.forward, nn.UninitializedParameter.__new__, torch.autograd.backward),
    ]
    return [(thing.__name__, getattr(thing, "__module__", None)) for thing in things]


# --- training --------------------------------------------------------------------------------------------------------


def trained(make: Callable[[Any], torch.optim.Optimizer]) -> Any:
    model = Small()
    optimizer = make(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(data(3, 4)) - 1).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure) for _ in range(3)]
    hooks = len(optimizer._optimizer_step_post_hooks), len(optimizer._optimizer_step_pre_hooks)
    return losses, list(model.parameters()), hooks


def _optimizers() -> None:
    for name in "SGD Adam AdamW Adamax NAdam RAdam Adagrad Adadelta ASGD RMSprop Rprop LBFGS Adafactor".split():
        kind = getattr(torch.optim, name, None)
        if kind is not None:
            USES[f"optimizer_{name}"] = functools.partial(trained, lambda p, kind=kind: kind(p, lr=0.01))
    USES["optimizer_nesterov"] = functools.partial(
        trained, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)
    )
    USES["optimizer_foreach"] = functools.partial(trained, lambda p: torch.optim.Adam(p, foreach=True))
    USES["optimizer_fused"] = functools.partial(trained, lambda p: torch.optim.AdamW(p, fused=True))


_optimizers()


@use
def averaged_models() -> Any:
    model = Small()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    return list(averaged.module.parameters())


@use
def transformer() -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).eval()
    padding = torch.tensor([[False, False, True], [False, True, True]])
    with torch.no_grad():
        return encoder(data(2, 3, 8), src_key_padding_mask=padding)


@use
def hooks() -> Any:
    optimizer: Any = sys.modules["torch.optim.optimizer"]
    counts = [
        len(hooks)
        for hooks in (
            *(nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks),
            *(optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks),
        )
    ]
    seen: list[str] = []
    model = Small()
    model.register_forward_hook(lambda *_: seen.append("forward"))
    model.first.register_forward_pre_hook(lambda *_: seen.append("before first"))
    model.second.register_full_backward_hook(lambda *_: seen.append("backward of second"))
    x = data(2, 4).requires_grad_()
    x.register_hook(lambda _: seen.append("tensor"))
    model(x).sum().backward()
    return counts, seen, len(torch.serialization._package_registry) > 0


@use
def exceptions_in_backward() -> Any:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ValueError("in backward")

    x = data(2).requires_grad_()
    try:
        Fails.apply(x).sum().backward()  # type: ignore[attr-defined]
    except ValueError as error:
        return str(error), [frame.name for frame in traceback.extract_tb(error.__traceback__)][-1]
    return None


@use
def anomaly_and_checkpoint() -> Any:
    from torch.utils.checkpoint import checkpoint

    x = data(2, 4).requires_grad_()
    with torch.autograd.detect_anomaly(check_nan=True):
        for reentrant in (False, True):
            checkpoint(Small(), x, use_reentrant=reentrant).sum().backward()  # type: ignore[union-attr]
    return x.grad


@use
def quantization() -> Any:
    quantized = torch.ao.quantization.quantize_dynamic(Small(), {nn.Linear}, dtype=torch.qint8)
    return quantized(data(2, 4)), type(quantized.first).__name__


@use
def autocast() -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return Small()(data(2, 4)), torch.is_autocast_enabled()


# --- the process -----------------------------------------------------------------------------------------------------


@use
def threads() -> Any:
    found = [torch.autograd.is_multithreading_enabled()]

    def work() -> None:
        Small()(data(2, 4)).sum().backward()
        found.append(torch.autograd.is_multithreading_enabled())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    work()
    return found


@use
def signals() -> Any:
    handler = signal.getsignal(signal.SIGINT)
    caught = []
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):
            Small()(data(2, 4))
    except KeyboardInterrupt:
        caught.append("interrupt")
    return repr(handler), [str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1)], caught


@use
def setters() -> Any:
    found = [torch.set_num_threads is torch._C.set_num_threads]
    before = torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True)
    found += [torch.get_num_threads(), str(torch.ones(1).dtype), torch.get_float32_matmul_precision()]
    found += [torch.are_deterministic_algorithms_enabled(), str(torch.get_default_device())]
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(before[0])
    torch.set_default_dtype(before[1])
    torch.set_float32_matmul_precision(before[2])
    return found


@use
def filters_and_finders() -> Any:
    if sys.argv[1] == "used":  # see the table in marid.guest
        return None
    return len(sys.meta_path), len(warnings.filters), sys.excepthook is sys.__excepthook__


class Squares(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, index**2]), {"name": str(index)}


@use
def data_loader() -> Any:
    return list(torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=2))


_NO_ACCELERATOR = (
    "'pin_memory' argument is set as true but no accelerator is found, then device pinned memory won't be used."
)


@use
def data_loader_with_pinning() -> Any:
    if sys.argv[1] == "used":  # there is a device then, for which it pins
        loader = torch.utils.data.DataLoader(Squares(), batch_size=3, pin_memory=True)
        assert all(x.is_pinned() for x, _ in loader)
        warnings.warn(_NO_ACCELERATOR, UserWarning, stacklevel=1)
        return list(loader)
    return list(torch.utils.data.DataLoader(Squares(), batch_size=3, pin_memory=True))


@use
def pinned_memory() -> Any:
    return data(2).is_pinned(), torch.empty(2, pin_memory=False).is_pinned()


@use
def pinning() -> Any:
    return None if sys.argv[1] == "used" else data(2).pin_memory()


def in_child(queue: Any) -> None:
    model = Small()
    model(data(2, 4)).sum().backward()
    queue.put([parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None])


@use
def forks() -> Any:
    Small()(data(2, 4)).sum().backward()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=in_child, args=(queue,))
    process.start()
    found = queue.get(timeout=60)
    process.join()
    return len(found), process.exitcode


@use
def shared_memory() -> Any:
    x = data(4).share_memory_()
    queue = torch.multiprocessing.get_context("fork").SimpleQueue()
    queue.put(x)
    return queue.get(), x.is_shared()


@use
def profiler() -> Any:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        Small()(data(2, 4)).sum().backward()
    return sorted({event.key for event in profile.key_averages() if event.key.startswith("aten::")})


@use
def distributed() -> Any:
    from torch import distributed as dist
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
    from torch.nn.parallel import DistributedDataParallel

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        model = DistributedDataParallel(Small())
        model(data(2, 4)).sum().backward()
        mesh = DeviceMesh("cpu", [0])
        whole = (distribute_tensor(data(4, 2), mesh, [Shard(0)]) * 2 + 1).full_tensor()
        gathered: list[Any] = [None]
        dist.all_gather_object(gathered, "here")
        found = [parameter.grad for parameter in model.parameters()], whole, gathered
        dist.destroy_process_group()
    return found


@use
def generators() -> Any:
    torch.manual_seed(3)
    first = torch.rand(2)
    with torch.random.fork_rng([] if sys.argv[1] == "used" else None):  # it warns of many devices
        torch.rand(2)
    return first, torch.rand(2), torch.get_rng_state().sum()


@use
def backward_through_many() -> Any:
    x = data(2).requires_grad_()
    y = x
    for _ in range(50):
        y = y * 1.01
    return torch.autograd.grad(y.sum(), x), torch.autograd.functional.jacobian(torch.sin, data(2))


def main() -> None:
    found: dict[str, Any] = {}
    for name, function in USES.items():
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = told(function())
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
        texts = sorted({f"{warning.category.__name__}: {warning.message}" for warning in caught})
        text = json.dumps([result, texts])
        found[name] = json.loads(re.sub(r"0x[0-9a-f]+", "0x", text))
    with open(sys.argv[2], "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
