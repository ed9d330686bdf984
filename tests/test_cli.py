"""``marid run`` beside ``python``: the same script, run by both, must look the same from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from marid.report import summary
from marid.report.stats import Sync

MARID = [sys.executable, "-m", "marid", "run", "--no-summary"]
PYTHON = [sys.executable]


def write(folder: Path, source: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    return path


def run(command: list[str], *arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=120, check=False
    )


def assert_same(script: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    expected = run(PYTHON, script, *arguments, cwd=cwd)
    got = run(MARID, script, *arguments, cwd=cwd)
    assert (got.returncode, got.stdout, got.stderr) == (expected.returncode, expected.stdout, expected.stderr)
    return got


def test_a_script_finds_nothing_imported_that_it_does_not_need(tmp_path: Path) -> None:
    """What draws tables, measures, goes over the wire or compiles would be waited for at each start."""
    script = write(
        tmp_path,
        """
        import sys
        import torch

        assert (torch.ones(3) + 1).sum().item() == 6.0
        unwanted = ("marid.remote", "marid.execute.compiled.lower", "rich", "zmq", "msgpack",
                    "blake3", "ray", "networkx", "safetensors", "torch._inductor.compile_fx")
        print([name for name in unwanted if name in sys.modules])
        """,
    )
    assert run(MARID, script).stdout == "[]\n"


def test_the_script_sees_what_it_sees_under_python(tmp_path: Path) -> None:
    write(tmp_path, "value = 41\n", "neighbour.py")
    write(
        tmp_path,
        """
        import atexit, builtins, pickle, sys
        from dataclasses import dataclass

        import neighbour

        @dataclass
        class Thing:
            value: int

        atexit.register(print, "goodbye")
        print(sys.argv, sys.path[0])
        print(__name__, __file__, __package__, __spec__, __doc__, __cached__, __annotations__)
        print(__builtins__ is builtins, type(__loader__).__name__, sys.modules["__main__"].Thing is Thing)
        print(pickle.loads(pickle.dumps(Thing(neighbour.value + 1))), Thing.__module__)
        print(sorted(name for name in globals()))
        print("to stderr", file=sys.stderr)
        """,
    )
    (tmp_path / "link.py").symlink_to(tmp_path / "script.py")
    arguments = ("--help", "-x", "--", "--as-cuda", "one two", "")
    assert_same(Path("script.py"), *arguments, cwd=tmp_path)
    assert_same(Path("..") / tmp_path.name / "link.py", cwd=tmp_path)


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('this went wrong')", 1),
        ("raise SystemExit(None)", 0),
        ("import os; os._exit(3)", 3),
        ("def f():\n    1 / 0\n\nf()\n", 1),
        ("try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('second') from e\n", 1),
        ("raise ExceptionGroup('several', [ValueError(1), TypeError(2)])", 1),
        ("x = (\n", 1),
        ("import neighbour", 1),
        ("import sys\nsys.excepthook = lambda *a: print('mine', a[0].__name__)\nraise ValueError\n", 1),
        ("import atexit\natexit.register(print, 'late')\nraise ValueError('early')\n", 1),
        ("import threading\nthreading.Thread(target=lambda: 1 / 0).start()\n", 0),
        ("raise KeyboardInterrupt('stop')", -signal.SIGINT),
    ],
)
def test_exit_codes_and_tracebacks_are_those_of_python(tmp_path: Path, source: str, code: int) -> None:
    write(tmp_path, "raise RuntimeError('in an import')\n", "neighbour.py")
    assert assert_same(write(tmp_path, source)).returncode == code


def test_ctrl_c_ends_the_process_as_under_python(tmp_path: Path) -> None:
    script = write(tmp_path, "import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen([*MARID, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert errors.startswith("Traceback (most recent call last):\n")
    assert errors.endswith("KeyboardInterrupt\n")
    assert "runner.py" not in errors


def test_printed_tensors_are_those_of_python(tmp_path: Path) -> None:
    """In containers, formatted, as results with names, summarised, of parameters and of the state of an optimizer."""
    script = write(
        tmp_path,
        """
        import torch

        torch.manual_seed(0)
        w = torch.nn.Parameter(torch.arange(6.).reshape(2, 3))
        x = torch.tensor([[1.5, 2.0, -3.25]])
        y = x @ w.t()
        print(x, str(x), f"{x}", f"{x.sum()}", f"{x.sum():.2f}", "%s %r" % (y, y), w)
        print([x, y], {"a": y.int(), "b": (y > 1,)}, repr(y))
        print(torch.arange(3000).reshape(30, 100), torch.zeros(0, 3), torch.zeros(0), torch.zeros(0).long())
        print(torch.randn(3).double(), torch.tensor([1 + 2j]).conj(), y.sum(), torch.tensor(3), torch.tensor(True))
        print(x.topk(2), torch.topk(x, 2), x.split(1), x.sort(), x.max(1), x.half(), torch.randn(200, 200))
        y.sum().backward()
        optimizer = torch.optim.Adam([w])
        optimizer.step()
        print(optimizer.state_dict(), w.grad, torch.nn.Linear(2, 2).state_dict())
        torch.set_printoptions(precision=2, sci_mode=True, edgeitems=1, threshold=5)
        print(torch.randn(10, 10))
        """,
    )
    assert_same(script)


def test_random_states_are_those_of_python(tmp_path: Path) -> None:
    """Of one generator, though the default device has another than the CPU; also where a state comes from elsewhere."""
    script = write(
        tmp_path,
        """
        import torch

        def look():
            state = torch.get_rng_state()
            print(state.dtype, state.shape, state.device, state.long().sum().item())
            return state

        torch.manual_seed(3)
        first = look()
        print(torch.rand(3), torch.randn(5))
        second = look()
        print(torch.randn(4), torch.rand(70, 70).sum())
        torch.random.set_rng_state(first)
        print(torch.rand(3), torch.randn(5))
        torch.set_rng_state(second.clone())
        print(torch.randn(4))
        look()
        with torch.random.fork_rng():
            print(torch.rand(100).sum())
        print(torch.rand(2))
        for draws in ((3,), (5000,), (3, 2000), (20, 7)):
            generator = torch.Generator().manual_seed(2**63 + 5)
            for count in draws:
                torch.randn(count, generator=generator, device="cpu")
            torch.set_rng_state(generator.get_state())
            print(torch.randn(3), torch.rand(2))
        torch.manual_seed(1)
        here, there = torch.rand(2, device="cpu"), torch.get_rng_state()
        drawn = torch.rand(2, device="cpu")
        torch.set_rng_state(there)
        print(torch.equal(torch.rand(2, device="cpu"), drawn))
        for wrong in (torch.zeros(5, dtype=torch.uint8), torch.zeros(5056)):
            try:
                torch.set_rng_state(wrong)
            except (RuntimeError, TypeError) as error:
                print(type(error), error)
        look()
        """,
    )
    assert_same(script)


def test_loaders_pin_what_is_made_on_the_default_device(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import torch, warnings
        from torch.utils.data import DataLoader, TensorDataset

        warnings.simplefilter("ignore")  # without an accelerator, PyTorch says that it does not pin
        torch.manual_seed(0)
        for batch in DataLoader([1, 2, 3], batch_size=2, shuffle=True, pin_memory=True, collate_fn=torch.tensor):
            print(batch)
        data = TensorDataset(torch.arange(6.0), torch.randn(6))
        print(list(DataLoader(data, batch_size=3, shuffle=True, pin_memory=True)))
        """,
    )
    assert_same(script)


def test_print_materialize_decides_under_marid_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sets it means it."""
    monkeypatch.setenv("MARID_PRINT_MATERIALIZE", "0")
    script = write(tmp_path, "import torch\nprint(torch.ones(2), [torch.ones(3)])\n")
    assert run(MARID, script).stdout.count("lazy)") == 2


def test_scripts_for_cuda_do_not_run_on_an_engine_that_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine needs the module that they would get another one for."""
    monkeypatch.setenv("MARID_ENGINE", "cuda:0")
    got = run([*MARID, "--as-cuda"], write(tmp_path, "print('ran')\n"))
    assert got.returncode == 2
    assert 'marid.connect(workers=1, device="cuda:0")' in " ".join(got.stderr.split())
    assert "ran" not in got.stdout


@pytest.mark.parametrize("engine", ["gpu", "cuda:x", ""])
def test_engines_have_names(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARID_ENGINE", engine)
    got = run(MARID, write(tmp_path, "print('ran')\n"))
    assert got.returncode
    assert "MARID_ENGINE must be cpu, cuda or cuda:N" in got.stderr


def test_an_engine_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARID_ENGINE", "cuda:7")
    got = run(MARID, write(tmp_path, "import torch\nprint(torch.ones(2).sum().item())\n"))
    assert got.returncode == 1
    assert "MARID_ENGINE=cuda:7 asks for a device that PyTorch" in got.stderr


def test_the_backward_of_another_accelerator_is_explained(tmp_path: Path) -> None:
    """PyTorch's own words say nothing of a second device."""
    use = "import torch, marid\ntorch.zeros(2, device='remote_accelerator')\n"
    script = write(
        tmp_path, use + "raise RuntimeError('opt_ready_stream && opt_parent_stream INTERNAL ASSERT FAILED')\n"
    )
    assert "MARID_ENGINE=cuda:0" in run(PYTHON, script).stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("device", "hint"),
    [
        ("remote_acelerator", "Did you mean 'remote_accelerator'?"),
        ("marid:0", "Did you mean 'remote_accelerator'?"),
        ("gpu", "Marid's device is called 'remote_accelerator'."),
        ("cuda", "`marid run --as-cuda`"),
        ("cuda:1", "`marid run --as-cuda`"),
    ],
)
def test_a_device_that_is_not_there(tmp_path: Path, device: str, hint: str) -> None:
    """What PyTorch says, and what there is."""
    script = write(tmp_path, f"import torch\ntorch.zeros(2, device={device!r})\n")
    got = run(MARID, script)
    assert got.returncode == 1
    *_, message, said = got.stderr.splitlines()
    assert message == run(PYTHON, script).stderr.splitlines()[-1]
    assert hint in said
    use = "import torch, marid\ntorch.zeros(2, device='remote_accelerator')\n"
    assert hint in run(PYTHON, write(tmp_path, f"{use}torch.zeros(2, device={device!r})\n", "plain.py")).stderr


def test_a_script_that_does_not_exist(tmp_path: Path) -> None:
    got = run(MARID, "nowhere.py", cwd=tmp_path)
    assert got.returncode == 2
    assert (
        got.stderr == f"marid: can't open file {str(tmp_path / 'nowhere.py')!r}: [Errno 2] No such file or directory\n"
    )
    got = run(MARID, tmp_path)
    assert got.returncode == 2
    assert "Is a directory" in got.stderr


def test_wrong_use_of_the_command() -> None:
    got = run([sys.executable, "-m", "marid"], "run", "--unknown", "script.py")
    assert got.returncode == 2
    assert "No such option" in got.stderr
    assert run([sys.executable, "-m", "marid"], "run").returncode == 2
    got = run([sys.executable, "-m", "marid"], "run", "--help")
    assert got.returncode == 0
    assert "SCRIPT [ARGUMENTS]" in got.stdout


def test_tensors_are_on_the_device_and_the_summary_names_the_line_that_waited(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import sys
        import torch

        x = torch.ones(3)
        print(x.device)
        for _ in range(4):
            print((x * 2).sum().item())
        sys.exit(5)
        """,
    )
    got = run([sys.executable, "-m", "marid", "run"], script, cwd=tmp_path)
    assert got.returncode == 5
    assert got.stdout == "remote_accelerator:0\n" + "6.0\n" * 4
    waited = [line.split() for line in got.stderr.splitlines() if "script.py:8" in line]
    assert len(waited) == 1
    assert waited[0][2:] == ["4", "script.py:8", "item()"]
    for fact in ("captured", "executed", "built", "reused", "fallbacks", "automatic cuts", "peak memory", "resident"):
        assert fact in got.stderr


def test_the_summary_follows_the_traceback_of_a_script_that_raises(tmp_path: Path) -> None:
    script = write(tmp_path, "import torch\nx = torch.ones(2) @ torch.ones(3)\n")
    got = run([sys.executable, "-m", "marid", "run"], script)
    assert got.returncode == 1
    assert f'File "{script}", line 2, in <module>' in got.stderr
    assert got.stderr.index("Traceback") < got.stderr.index("captured")
    assert "runner.py" not in got.stderr


def test_the_summary_comes_once_and_after_the_output(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        """
        import os, sys
        if os.fork() == 0:
            sys.exit()
        os.wait()
        print("done")
        """,
    )
    got = subprocess.run(
        [sys.executable, "-m", "marid", "run", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    assert got.stdout.count("materialisations") == 1
    assert got.stdout.index("done") < got.stdout.index("materialisations")


def test_lines_of_the_summary_are_summed_and_sorted() -> None:
    lines = summary.by_line(
        [Sync("a.py:1", "item()", 1, 0.5), Sync("b.py:2", "item()", 2, 2.0), Sync("a.py:1", "tolist()", 3, 4.0)]
    )
    assert [(line.source, line.reasons, line.count, line.seconds) for line in lines] == [
        ("a.py:1", ["item()", "tolist()"], 4, 4.5),
        ("b.py:2", ["item()"], 2, 2.0),
    ]


_LOADERS = """
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

class Squares(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.tensor([float(index)]) ** 2, index

first, second = random_split(TensorDataset(torch.arange(10.0)), [6, 4], generator=torch.Generator().manual_seed(1))
torch.manual_seed(2)
order = torch.Generator().manual_seed(4)
print([batch.tolist() for (batch,) in DataLoader(first, batch_size=2, shuffle=True, generator=order)])
for workers in (0, 2):
    for x, y in DataLoader(Squares(), batch_size=3, num_workers=workers):
        print(x.flatten().tolist(), y.tolist())
"""


def test_data_loaders(tmp_path: Path) -> None:
    """Shuffling, splitting and worker processes, in a script that names no device."""
    assert "[0.0, 1.0, 4.0] [0, 1, 2]" in assert_same(write(tmp_path, _LOADERS)).stdout


_WARNINGS = """
import torch
import torch.nn.functional as F

x = torch.ones(2, device=DEVICE)
wide = torch.ones(2, 1, device=DEVICE)
torch.ones(2, 3, 2, device=DEVICE).T
F.mse_loss(x, wide)
torch.nn.MSELoss()(x, wide)
F.softmax(x)
torch.nn.Softmax()(x)
F.binary_cross_entropy(x, x, reduce=True)
torch.tensor(x)
torch.range(0, 3, device=DEVICE)
"""


@pytest.mark.parametrize("options", [[], ["--as-cuda"]], ids=["run", "as_cuda"])
def test_warnings_name_the_lines_that_they_name_under_python(tmp_path: Path, options: list[str]) -> None:
    """Where functions are called through a function mode, which each of the two commands enters."""
    device = "cuda" if options else None
    script = tmp_path / "script.py"
    script.write_text(_WARNINGS.replace("=DEVICE", "='cpu'"))
    expected = run([sys.executable, str(script)]).stderr
    script.write_text(_WARNINGS.replace("=DEVICE", f"={device!r}"))
    got = run([*MARID[:-1], *options, "--no-summary", str(script)]).stderr
    assert expected.count("Warning") == 8
    assert got.replace(f"={device!r}", "='cpu'") == expected


_CHILDREN = """
import multiprocessing, subprocess, sys
import torch

def made(_):
    return torch.ones(2).device.type

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.map(made, [0]))
    print(subprocess.check_output([sys.executable, "-c", "import torch; print(torch.ones(2).device)"], text=True))
"""


def test_processes_that_a_script_spawns_use_the_device(tmp_path: Path) -> None:
    """And no others that it starts."""
    got = run([*MARID[:-1], "--no-summary", str(write(tmp_path, _CHILDREN))])
    assert got.stdout == "['remote_accelerator']\n['remote_accelerator']\ncpu\n\n"


def test_the_summary_says_that_nothing_ran_on_the_device(tmp_path: Path) -> None:
    """Where a framework has taken another one."""
    script = write(tmp_path, "import torch\nprint(torch.ones(2, device='cpu').sum())\n")
    got = run([*MARID[:-1], str(script)])
    assert "nothing ran on the device" in got.stderr
