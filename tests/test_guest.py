"""Marid as a guest: what the import, the first tensor and ``marid.uninstall()`` do to PyTorch and to the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from marid import native
from tests.helpers import DEVICE


def _python(*arguments: object, **environment: str) -> str:
    everything = {**os.environ, "OMP_NUM_THREADS": "1", "MARID_AUTOLOAD": "0", **environment}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=everything, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _lines(script: str, **environment: str) -> list[str]:
    """The lines that a script prints in a process of its own."""
    return _python("-c", f"DEVICE = {DEVICE!r}\n" + textwrap.dedent(script), **environment).splitlines()


def _found(state: str, folder: Path) -> dict[str, Any]:
    _python("-m", "tests.guest", state, folder / state, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    return json.loads((folder / state).read_text())


def test_what_people_do_with_pytorch_is_the_same(tmp_path: Path) -> None:
    """Results, exceptions and warnings, with the import and with a tensor of the device: of ``tests/guest``."""
    plain = _found("plain", tmp_path)
    assert len(plain) > 95
    for state in ("imported", "used"):
        found = _found(state, tmp_path)
        where_used = {"pinning", "filters_and_finders", "threads_that_there_are"} if state == "used" else set()
        if torch.version.cuda is not None and not torch.cuda.is_available():
            where_used.add("pinning")  # an error with and without: it names a missing driver, or accelerator
        differences = {name: (plain[name], found[name]) for name in plain if plain[name] != found[name]}
        assert differences.keys() <= where_used, differences
    failing = {name for name, (result, _) in plain.items() if isinstance(result, str) and "Error" in result[:30]}
    assert failing <= {"pinning", "copies"}


def test_several_threads_use_the_device_first() -> None:
    """Each gets a tensor, whichever of them has to make the changes that it needs."""
    script = """
        import threading, torch, marid

        failed, start = [], threading.Barrier(4)

        def work():
            start.wait()
            try:
                assert torch.full((4,), 2.0, device=DEVICE).add(1).tolist() == [3.0] * 4
            except Exception as error:
                failed.append(repr(error))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(failed)
    """
    assert _lines(script) == ["[]"]


_SNAPSHOT = """
import importlib, sys, types, warnings
import torch, torch.utils.data, torch.optim.swa_utils, torch.fx.experimental.proxy_tensor
from torch import nn

# Numbers count and texts are made up as they are asked for; these are what can be replaced or added to.
KINDS = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.GetSetDescriptorType)
KINDS += (type, property, staticmethod, classmethod, types.ModuleType, torch.nn.Module)

def told(value):
    if isinstance(value, (list, tuple)):
        return id(value), [id(item) for item in value]
    if isinstance(value, dict):
        return id(value), [(id(key), id(item)) for key, item in list(value.items())]
    return id(value) if isinstance(value, KINDS) else None

def snapshot():
    found = {}
    for name in [name for name in sys.modules if name == "torch" or name.startswith("torch.")]:
        for key, value in list(getattr(sys.modules[name], "__dict__", {}).items()):
            found[name, key] = told(value)
            if isinstance(value, type) and value.__module__.startswith("torch"):
                found.update({(name, key, attribute): told(inner) for attribute, inner in list(vars(value).items())})
    return found

def process():
    switch = torch.autograd.is_multithreading_enabled()
    return list(sys.meta_path), len(warnings.filters), sys.excepthook, switch

def settled():
    first, second = snapshot(), snapshot()
    return {key: value for key, value in first.items() if value == second[key]}

def differences(before, after):
    return [".".join(key) for key, value in before.items() if after.get(key) != value]

def work(device):
    model = nn.Linear(2, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2, device=device)).sum().backward()
    optimizer.step()
    return model.weight, len(optimizer._optimizer_step_post_hooks)
"""
# Caches that PyTorch fills as it goes.
_CACHES = ("_cache", "_builtin_table", "_dir", "_all_leaf", "_seen", "_impls", "_registry_lock")


def _changed(names: list[str]) -> list[str]:
    return [name for name in names if not any(cache in name.lower() for cache in _CACHES)]


@pytest.mark.parametrize("dynamo", ["", "import torch._dynamo"])
def test_uninstall_undoes_everything(dynamo: str) -> None:
    """Everything in PyTorch's modules and classes is what it was; the next tensor changes it again."""
    [*left, last] = _lines(
        dynamo
        + _SNAPSHOT
        + textwrap.dedent(
            """
            work("cpu")
            import marid
            work(DEVICE)  # what kernels import
            marid.uninstall()
            before, around = settled(), process()
            for _ in range(2):
                weight, hooks = work(DEVICE)
                assert hooks == 1
                changed = differences(before, snapshot())
                assert {"torch.nn.Module._apply", "torch.set_num_threads"} <= set(changed), changed
                assert len(changed) > 20 and process() != around
                marid.uninstall()
                print(*differences(before, snapshot()), sep="\\n")
                assert process() == around, (process(), around)
                assert weight.tolist() and (weight + 1).tolist()
                marid.uninstall()  # of a read: nothing
            print("done")
            """
        )
    )
    assert _changed([name for name in left if name]) == []
    assert last == "done"


def test_a_forgotten_change_would_be_seen() -> None:
    """The snapshot tells of a function that is replaced, of one that is added, and of an item in a list."""
    assert _lines(
        _SNAPSHOT
        + textwrap.dedent(
            """
            before = settled()
            nn.Module._apply, torch.topk = torch.topk, torch.chunk
            sys.modules["torch.optim.optimizer"]._foreach_supported_types.append(int)
            found = differences(before, snapshot())
            print({"torch.nn.Module._apply", "torch.topk"} <= set(found), any("_foreach" in name for name in found))
            """
        )
    ) == ["True True"]


_LIGHT = {"marid", "marid_native", "marid.registration", "marid.built", "marid.settings", "marid.uninterrupted"}


_AUTOLOADED = "import os, marid_autoload; os.environ['MARID_AUTOLOAD'] = '1'; marid_autoload.autoload()"


@pytest.mark.parametrize(("how", "count"), [("import marid", 205), (_AUTOLOADED, 30)])
def test_the_import_changes_nothing(how: str, count: int) -> None:
    """Nothing that PyTorch's modules and classes had is another object; its registries have one entry more. Large
    packages are not imported; and where it is PyTorch that imports Marid, few files are."""
    [*changed, imported] = _lines(
        _SNAPSHOT
        + textwrap.dedent(
            f"""
            work("cpu")
            before, around, modules = settled(), process(), set(sys.modules)
            {how}
            assert process() == around
            print(*differences(before, snapshot()), sep="\\n")
            print(*set(sys.modules) - modules)
            """
        )
    )
    renamed = ("DeviceType", "ProfilerActivity")  # PyTorch's enumerations, by its own `rename_privateuse1_backend`
    changed = [name for name in _changed(changed) if name and not any(part in renamed for part in name.split("."))]
    tables = ("default_device_backend_map", "backend_capability", "backend_list", "backend_type_map", "_plugins")
    places = ("torch.distributed.Backend", "torch.distributed.distributed_c10d.Backend")
    registered = {f"{place}.{name}" for place in places for name in (*tables, "MARID_GLOO")}
    assert {*changed} - registered == {"torch.serialization._package_registry"}
    modules = set(imported.split())
    assert len(modules) < count
    assert not {name.partition(".")[0] for name in modules} & {"sympy", "networkx", "rich", "zmq"}
    assert {name for name in modules if name.startswith("torch.")} <= {
        "torch.remote_accelerator",
        "torch.utils._device",
    }
    if "autoload" in how:
        assert {name for name in modules if name.startswith("marid")} - {"marid_autoload"} < _LIGHT


@pytest.mark.parametrize(
    "make",
    [
        "torch.ones(2, device=DEVICE)",
        "torch.tensor([1.0], device=DEVICE)",
        "torch.ones(2).to(DEVICE)",
        "torch.ones(2).remote_accelerator()",
        "nn.Linear(2, 2).to(DEVICE)",
        "nn.Linear(2, 2, device=DEVICE)",
        "nn.LazyLinear(2, device=DEVICE)",
        "nn.LazyLinear(2).to(DEVICE)(torch.ones(3, 2, device=DEVICE))",
        "nn.LazyBatchNorm1d().to(DEVICE)(torch.ones(3, 2, device=DEVICE))",
        "nn.Linear(2, 2).remote_accelerator()",
        "(torch.set_default_device(DEVICE), torch.ones(2))[1]",
        "in_context()",
        "torch.Generator(device=DEVICE)",
        "torch.load(file(), map_location=DEVICE)",
        "torch.zeros_like(torch.ones(2), device=DEVICE)",
        "torch.ones(2).new_ones(2, device=DEVICE)",
        "torch.ones(2).type('torch.remote_accelerator.FloatTensor')",
        "torch.as_tensor([1.0], device=DEVICE)",
        "torch.asarray([1.0], device=DEVICE)",
        "torch.eye(2, device=DEVICE)",
        "torch.randn(2, device=torch.device(DEVICE, 1))",
        "marid.load_file(weights(), DEVICE)",
        "capture()",
    ],
)
def test_every_way_to_the_device_is_a_first_use(make: str, tmp_path: Path) -> None:
    """Whatever comes first, the device works, and so does what must be changed for it."""
    assert _lines(
        f"""
        import io, torch
        from torch import nn
        import marid

        def file():
            made = io.BytesIO()
            torch.save(torch.ones(2), made)
            made.seek(0)
            return made

        def weights():
            import json, struct
            header = json.dumps({{"x": {{"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}}}).encode()
            path = {str(tmp_path / "x.safetensors")!r}
            with open(path, "wb") as out:
                out.write(struct.pack("<Q", len(header)) + header + bytes(8))
            return path

        def in_context():
            with torch.device(DEVICE):
                return torch.ones(2)

        def capture():
            with marid.capture():
                return torch.ones(2)

        assert not torch.remote_accelerator.is_initialized() and not torch.accelerator.is_available()
        made = {make}
        model = nn.Linear(2, 1)
        weight = model.weight
        model.to(DEVICE)
        assert model.weight is weight and torch.accelerator.is_available()
        model(torch.ones(1, 2, device=DEVICE)).sum().backward()
        print(torch.remote_accelerator.is_initialized(), model.weight.grad.tolist())
        """
    ) == ["True [[1.0, 1.0]]"]


def test_parameters_stay_the_same_objects_in_the_first_move() -> None:
    """Which is under way when the changes are made: tied weights stay tied, and gradients come along."""
    assert _lines(
        """
        import torch, marid
        from torch import nn
        layers = [nn.Linear(2, 2) for _ in range(3)]
        layers[2].weight = layers[0].weight
        model = nn.Sequential(nn.Sequential(*layers[:2]), layers[2], nn.BatchNorm1d(2))
        model(torch.ones(3, 2)).sum().backward()
        before = list(model.parameters())
        grads = [p.grad.clone() for p in before]
        model.to(DEVICE)
        after = list(model.parameters())
        same = all(a is b for a, b in zip(before, after))
        print(len(before) == len(after), same, layers[2].weight is layers[0].weight)
        print({type(p).__name__ for p in after}, all(p.grad.device.type == DEVICE for p in after))
        print(all(torch.equal(p.grad.cpu(), grad) for p, grad in zip(after, grads)), {p.requires_grad for p in after})
        """
    ) == ["True True True", "{'LazyTensor'} True", "True {True}"]


@pytest.mark.parametrize("move", ["to(DEVICE)", "to(DEVICE, torch.float64)", "to(DEVICE).to('cpu').to(DEVICE)"])
def test_modules_without_shapes_as_the_first_to_move(move: str) -> None:
    """Inside of others, with buffers: parameters stay the same objects."""
    assert _lines(
        f"""
        import torch, marid
        from torch import nn
        lazy = nn.LazyLinear(2)
        model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(lazy, nn.LazyBatchNorm1d()), nn.LazyLinear(2))
        weights = list(model.parameters())
        model.{move}
        print(all(a is b for a, b in zip(weights, model.parameters())), {{str(p.device) for p in weights}})
        print({{str(b.device) for b in model.buffers()}}, {{str(p.dtype) for p in weights}})
        torch.manual_seed(0)
        with torch.no_grad():
            for p in model[0].parameters(): p.fill_(1.0)
        out = model(torch.ones(5, 4, device=DEVICE, dtype=weights[0].dtype))
        out.sum().backward()
        print(out.shape, all(a is b for a, b in zip(weights, model.parameters())), lazy.weight.grad.shape)
        """
    ) == [
        "True {'remote_accelerator:0'}",
        f"{{'remote_accelerator:0'}} {{'torch.float{64 if '64' in move else 32}'}}",
        "torch.Size([5, 2]) True torch.Size([2, 3])",
    ]


def test_unpickling_is_a_first_use() -> None:
    """Of a tensor that was on the device."""
    pickled = _lines(
        """
        import torch, pickle, marid
        print(pickle.dumps(torch.ones(2, device=DEVICE) * 3).hex())
        """
    )
    again = _lines(
        f"""
        import torch, pickle, marid
        print((pickle.loads(bytes.fromhex({pickled[0]!r})) + 1).tolist(), torch.remote_accelerator.is_initialized())
        """
    )
    assert again == ["[4.0, 4.0] True"]


def test_a_seed_that_was_set_before_the_first_use_counts() -> None:
    """As for the CPU."""
    first, second = _lines(
        """
        import torch, marid
        torch.manual_seed(7)
        print(torch.rand(3, device=DEVICE).tolist())
        torch.manual_seed(7)
        print(torch.rand(3).tolist())
        """
    )
    assert first == second


def test_the_accelerator_answers_questions_about_memory() -> None:
    """Numbers when the device is used, and an end of the process never."""
    assert _lines(
        """
        import torch, marid
        a = torch.accelerator
        print(a.memory_allocated(), a.max_memory_allocated(), a.memory_stats(), a.memory_reserved())
        a.empty_cache(), a.empty_host_cache()
        x = torch.ones(1000, device=DEVICE)
        x.tolist()
        print(a.memory_allocated(), a.max_memory_allocated() >= 4000)
        a.reset_peak_memory_stats(), a.empty_cache(), a.empty_host_cache(), a.synchronize()
        del x
        print(a.memory_allocated())
        pinned = torch.ones(3).pin_memory()
        print(pinned.is_pinned(), pinned[1:].is_pinned(), torch.ones(3).is_pinned(), pinned.to(DEVICE).tolist())
        """
    ) == ["0 0 OrderedDict() 0", "4000 True", "0", "True True False [1.0, 1.0, 1.0]"]


def test_quantization_under_marid_run(tmp_path: Path) -> None:
    """Of a model that the script keeps on the CPU."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4)).to('cpu')\n"
        "quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)\n"
        "print(quantized(torch.ones(1, 4, device='cpu')).shape)\n"
    )
    assert "torch.Size([1, 4])" in _python("-W", "ignore", "-m", "marid", "run", "--no-summary", script)


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """A folder that makes PyTorch find Marid's entry point, as an installation does."""
    info = tmp_path / "marid_here-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: marid-here\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nmarid-here = marid_autoload:autoload\n")
    return os.pathsep.join([str(tmp_path), str(Path(native.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])


@pytest.mark.parametrize(
    ("version", "drivers", "known"),
    [
        ("cuda", ["/dev/nvidiactl"], False),
        ("cuda", [], True),
        ("hip", ["/dev/kfd"], False),
        ("xpu", ["/dev/dri"], False),
    ],
)
def test_beside_an_accelerator_the_device_needs_an_import(version: str, drivers: list[str], known: bool) -> None:
    """With a foreign device registered, autograd on the other one fails in PyTorch itself."""
    lines = _lines(
        f"""
        import os, torch, marid_autoload
        os.environ["MARID_AUTOLOAD"] = "1"
        os.path.exists = lambda path, drivers={drivers}, exists=os.path.exists: path in drivers or (
            not path.startswith("/dev/") and exists(path))
        torch.version.cuda = torch.version.hip = torch.version.xpu = None  # whatever PyTorch is built for here
        torch.version.{version} = "13.0"
        marid_autoload.autoload()
        print(hasattr(torch, DEVICE))
        torch.version.{version} = None
        import marid
        print(torch.ones(2, device=DEVICE).sum().item())
        """
    )
    assert lines == [str(known), "2.0"]


@pytest.mark.parametrize(
    ("switches", "known"),
    [
        ({"MARID_AUTOLOAD": "1"}, "True"),
        ({"MARID_AUTOLOAD": "0"}, "False"),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "False"),
    ],
)
def test_pytorch_knows_the_device_without_an_import(installed: str, switches: dict[str, str], known: str) -> None:
    """Unless that is switched off; the rest is loaded with the first tensor, or by an import."""
    for first in ("torch.ones(2, device=DEVICE)", "exec('import marid') or marid.LazyTensor"):
        lines = _lines(
            f"""
            import sys, torch
            print(hasattr(torch, DEVICE), "marid" in sys.modules, "marid.frontend" in sys.modules)
            if not hasattr(torch, DEVICE): import marid
            {first}
            print("marid.frontend" in sys.modules, (torch.ones(2, device=DEVICE) + 1).tolist())
            import marid
            print(marid.stats().fallbacks, marid.graph is marid.api.graph, marid.settings.devices > 0)
            """,
            PYTHONPATH=installed,
            **switches,
        )
        assert lines == [f"{known} False False", "True [2.0, 2.0]", "{} True True"]


# --- forks -----------------------------------------------------------------------------------------------------------

_FORK = """
def in_child(work):
    import os, signal, sys
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            print(work(), flush=True)
        except RuntimeError as error:
            print(type(error).__name__, str(error).splitlines()[0], flush=True)
        os._exit(0)
    return os.waitpid(child, 0)[1]
"""


def test_a_forked_child_works_with_the_device() -> None:
    """With tensors that there are, that are pending, and that it makes; the parent goes on."""
    assert _lines(
        _FORK
        + textwrap.dedent(
            """
            import torch, marid
            x = torch.arange(4.0, device=DEVICE)
            x.tolist()
            y = x * 2
            def gradient(device):
                w = torch.ones(2, device=device, requires_grad=True)
                (w * 3).sum().backward()
                return w.grad.tolist()
            def work():
                return (y + torch.ones(4, device=DEVICE)).tolist(), gradient(DEVICE), gradient("cpu")
            assert gradient(DEVICE) == gradient("cpu")
            assert in_child(work) == 0
            print(y.tolist(), gradient(DEVICE))
            """
        )
    ) == ["([1.0, 3.0, 5.0, 7.0], [3.0, 3.0], [3.0, 3.0])", "[0.0, 2.0, 4.0, 6.0] [3.0, 3.0]"]


def test_a_forked_child_of_a_process_that_only_imported_works_with_the_device() -> None:
    assert _lines(
        _FORK
        + textwrap.dedent(
            """
            import torch, marid
            assert in_child(lambda: (torch.ones(2, device=DEVICE) + 1).tolist()) == 0
            print((torch.ones(2, device=DEVICE) + 1).tolist())
            """
        )
    ) == ["[2.0, 2.0]", "[2.0, 2.0]"]


def test_a_forked_child_has_no_connection() -> None:
    """It says so at once, where it would have to wait for ever."""
    pytest.importorskip("zmq")
    said, made, parent = _lines(
        _FORK
        + textwrap.dedent(
            """
            import torch, marid
            if __name__ == "__main__":
                marid.connect(workers=1)
                x = torch.arange(4.0, device=DEVICE)
                y = x * 2
                x.tolist()
                assert in_child(lambda: y.tolist()) == 0
                assert in_child(lambda: torch.ones(2, device=DEVICE).tolist()) == 0
                print(y.tolist())
            """
        )
    )
    for line in (said, made):
        assert "fork" in line
    assert parent == "[0.0, 2.0, 4.0, 6.0]"


# --- timings ---------------------------------------------------------------------------------------------------------


@pytest.mark.conformance
def test_the_import_costs_plain_pytorch_nothing() -> None:
    """Calls of modules, small operators and optimizers on the CPU, within 2 %; on a machine that does nothing else."""
    script = Path(__file__).parents[1] / "benchmarks" / "guest.py"
    ratios = json.loads(_python(script, "--json", "--rounds", "150"))
    assert {name: ratio for name, ratio in ratios.items() if ratio["imported"] > 1.02} == {}
