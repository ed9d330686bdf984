"""Large packages that PyTorch imports without a need: they are not imported, and nothing else changes."""

from __future__ import annotations

import pytest

from tests.test_late import run_alone

_OPTIMIZERS = "SGD Adam AdamW NAdam RAdam Adamax RMSprop Rprop Adagrad Adadelta ASGD LBFGS Adafactor Muon".split()


def test_optimizers_do_not_import_dynamo() -> None:
    """They train as PyTorch's own do, in this process before Dynamo is there, and behind its import."""
    values = run_alone(
        f"""
        from torch import nn

        def trained(name, device):
            torch.manual_seed(0)
            linear = nn.Linear(4, 3, bias=False).to(device)
            optimizer = getattr(torch.optim, name)(linear.parameters(), lr=0.1)
            x = torch.arange(8.0).view(2, 4).to(device)
            def closure():
                optimizer.zero_grad()
                loss = linear(x).tanh().square().mean()
                loss.backward()
                return loss
            for _ in range(3):
                torch.set_grad_enabled(True)
                closure()
                optimizer.step(closure)
                assert torch.is_grad_enabled()
            optimizer.load_state_dict(optimizer.state_dict())
            return linear.weight.detach().cpu()

        names = {_OPTIMIZERS!r}
        torch.remote_accelerator.init()
        mine, early = [[trained(name, device) for name in names] for device in (DEVICE, "cpu")]
        print("torch._dynamo" in sys.modules, "sympy" in sys.modules)
        import torch._dynamo
        late = [trained(name, "cpu") for name in names]
        print(all(map(torch.equal, mine, early)), all(map(torch.equal, early, late)))
        """
    )
    assert values == ["False False", "True True"]


def test_steps_have_their_own_code_again_behind_the_import_of_dynamo() -> None:
    values = run_alone(
        """
        own = torch.optim.SGD.step.__code__
        torch.remote_accelerator.init()
        spared, function = torch.optim.SGD.step.__code__, torch.optim.SGD.step
        marid.uninstall()
        print(torch.optim.SGD.step.__code__ is own)
        torch.remote_accelerator.init()
        print(spared is own, torch.optim.SGD.step.__code__ is own, torch.optim.SGD.step is function)
        import torch._dynamo
        print(torch.optim.SGD.step.__code__ is own, hasattr(torch._compile, "getattr"))
        weight = torch.ones(2, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=1.0)
        torch.compile(lambda: (weight.square().sum().backward(), optimizer.step()), backend="eager")()
        print(weight.tolist())
        """
    )
    assert values == ["True", "False False True", "True False", "[-1.0, -1.0]"]


def test_dynamo_disables_what_it_would_have_disabled() -> None:
    """Once it is imported, PyTorch's reference implementations ask it again."""
    values = run_alone(
        """
        def disabled():
            function, found = torch._refs.where, False
            while function is not None:
                found |= hasattr(function, "__dynamo_disable")
                function = getattr(function, "__wrapped__", None)
            return found

        x = torch.randn(4, 4, device=DEVICE)
        torch._refs.where(torch.ones(2, device="meta") > 0, 1.0, 2.0)
        print(disabled(), "torch._dynamo" in sys.modules)
        import torch._dynamo
        torch._refs.where(torch.ones(2, device="meta") > 0, 1.0, 2.0)
        print(disabled(), hasattr(torch._compile, "getattr"))
        """
    )
    assert values == ["False False", "True False"]


_IMPORTS = [
    ("another thread", "import sympy.core.kind; assert sympy.core.kind is sys.modules['sympy.core.kind']"),
    ("another thread", "from torch.fx.experimental.symbolic_shapes import ShapeEnv, guard_or_false; ShapeEnv()"),
    ("another thread", "import torch._dynamo; torch._dynamo.reset()"),
    ("the kernel", "from sympy import Basic, Symbol; assert issubclass(Symbol, Basic)"),
    ("the kernel", "import sympy; sympy.Symbol('x')"),
]


@pytest.mark.parametrize(("who", "statement"), _IMPORTS)
def test_others_import_the_packages_themselves(who: str, statement: str) -> None:
    """While a meta kernel runs. No module is imported twice."""
    values = run_alone(
        f"""
        import threading
        from marid.frontend.spared_imports import SizesAreNumbers

        def user():
            exec({statement!r}, {{"sys": sys, "torch": torch}})
            print("imported")

        torch.remote_accelerator.init()
        with SizesAreNumbers():
            kinds = torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND
            torch._prims_common.elementwise_dtypes(1.0, type_promotion_kind=kinds.DEFAULT)
            print(type(sys.modules["sympy"]).__name__)
            if {who!r} == "the kernel":
                user()
            else:
                thread = threading.Thread(target=user)
                thread.start()
                thread.join()
        import sympy
        from torch.fx.experimental.symbolic_shapes import ShapeEnv
        print(type(sympy).__name__, sympy.__spec__.name, sympy.core.kind.__spec__.name)
        print(sympy.Symbol("x").kind is sympy.core.kind.NumberKind, issubclass(sympy.Symbol, sympy.core.basic.Basic))
        """
    )
    assert values == ["_StandIn", "imported", "module sympy sympy.core.kind", "True True"]


@pytest.mark.parametrize(
    "statement",
    ["import torch._dynamo", "import sympy.core.kind", "from torch.fx.experimental.symbolic_shapes import ShapeEnv"],
)
def test_packages_are_imported_while_other_threads_run_meta_kernels(statement: str) -> None:
    values = run_alone(
        f"""
        import threading
        from marid.frontend.spared_imports import SizesAreNumbers

        torch.remote_accelerator.init()
        imported, calls = threading.Event(), []

        def ask():
            while not imported.is_set():
                with SizesAreNumbers():
                    calls.append(torch.where(torch.ones(2, device="meta") > 0, 1.0, 2.0).shape)
                    torch.ones(3, device="meta").add_(1)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        while len(calls) < 20:
            pass
        {statement}
        imported.set()
        for thread in threads:
            thread.join()
        double = torch.compile(lambda x: x[: x.shape[0] // 2] * 2, dynamic=True, backend="aot_eager")
        print([double(torch.ones(size)).tolist() for size in (4, 6)])
        import sympy
        print(sympy.Symbol("x") + 1, type(sympy).__name__, len(sympy.printing.__name__))
        """
    )
    assert values == ["[[2.0, 2.0], [2.0, 2.0, 2.0]]", "x + 1 module 14"]


def test_meta_kernels_say_the_same() -> None:
    """Of PyTorch's samples, with what stands in for sympy and with itself: sizes, strides, types and errors."""
    values = run_alone(
        """
        import itertools, warnings
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.utils._pytree import tree_map
        from marid.frontend import spared_imports
        from marid.frontend.spared_imports import SizesAreNumbers

        warnings.simplefilter("ignore")
        torch.remote_accelerator.init()
        names = "sympy", "torch.fx.experimental.symbolic_shapes"
        to_meta = lambda item: item.to("meta") if isinstance(item, torch.Tensor) else item
        described = lambda item: (item.shape, item.stride(), item.dtype) if isinstance(item, torch.Tensor) else item

        def outcome(function, sample):
            try:
                return tree_map(described, function(sample.input, *sample.args, **sample.kwargs))
            except Exception as error:
                return type(error), str(error)

        calls, differ, imported = 0, [], set()
        for op in op_db:
            functions = [op.op]
            if (write := op.inplace_variant) is not None:
                functions.append(lambda x, *args, write=write, **kwargs: write(x.clone(), *args, **kwargs))
            dtypes = [dtype for dtype in (torch.float32, torch.int64) if dtype in op.supported_dtypes("cpu")]
            for dtype, function in itertools.product(dtypes, functions):
                for sample in itertools.islice(op.sample_inputs("cpu", dtype), 1):
                    sample = sample.transform(to_meta)
                    expected = outcome(function, sample)
                    themselves = {name: sys.modules.pop(name) for name in names}
                    spared_imports._spares_sympy = True  # until one is imported
                    with SizesAreNumbers():
                        seen = outcome(function, sample)
                        if any(type(sys.modules.get(name)).__name__ != "_StandIn" for name in names):
                            imported.add(op.name)
                    sys.modules.update(themselves)
                    torch.fx.experimental.symbolic_shapes = themselves[names[1]]
                    calls += 1
                    if seen != expected:
                        differ.append((op.name, dtype, expected, seen))
        print(calls > 1000, differ, sorted(imported - {"diagonal_scatter", "select_scatter", "slice_scatter"}))
        """
    )
    assert values == ["True [] []"]  # PyTorch 2.12 needs sympy for two of the three
