"""The layers of the package: each module imports only from its own layer or from those below it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import networkx

import marid

ROOT = Path(marid.__file__).parent

# From the bottom up; the longest matching prefix places a module.
LAYERS = [
    {"errors", "imports", "policy", "recent", "settings", "uninterrupted"},
    {"built"},
    {"registration"},
    {"native"},
    {"ops"},
    {"graph"},
    {"semantics"},
    {"report.builds", "report.hooks", "report.operator_times", "report.stats", "report.traffic", "report.units"},
    {"execute"},
    {"engine"},
    {"remote"},
    {"frontend"},
    {"replay"},
    {"placement", "saved"},
    {"environment", "frameworks"},
    {
        "api",
        "runner",
        "as_cuda",
        "changes",
        "guest",
        "lightning",
        "report",
        "remote.launch.connect",
        "remote.client.parallel",
    },
    {"", "cli", "models"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def _modules() -> dict[str, Path]:
    """Dotted names below ``marid``, the package itself being the empty name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def _rank(module: str) -> int:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in RANK:
            return RANK[prefix]
    raise AssertionError(f"marid.{module} is in no layer: add it to LAYERS in {Path(__file__).name}")


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _imports(path: Path, everywhere: bool) -> set[str]:
    """What a module imports of marid: at its top level, or also inside of functions; never for type checkers only."""
    modules = _modules()
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if _is_type_checking(node) or (isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not everywhere):
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("marid.") in modules else node.module for name in names]
        else:
            assert not isinstance(node, ast.ImportFrom), f"{path}: relative import"
            continue
        found |= {name.removeprefix("marid").removeprefix(".") for name in names if name.split(".")[0] == "marid"}
    return found


def _edges(everywhere: bool) -> list[tuple[str, str]]:
    return [(module, used) for module, path in _modules().items() for used in _imports(path, everywhere)]


def test_nothing_imports_upward() -> None:
    """Not even inside of a function."""
    upward = [(a, b) for a, b in _edges(everywhere=True) if _rank(b) > _rank(a)]
    assert not upward


def test_modules_import_each_other_without_cycles() -> None:
    """At module level."""
    assert list(networkx.simple_cycles(networkx.DiGraph(_edges(everywhere=False)))) == []


def test_the_check_sees_the_imports() -> None:
    """Edges that are known to be there, in each of the forms of an import."""
    edges = set(_edges(everywhere=True))
    assert ("engine.inprocess", "graph.node") in edges
    assert ("guest", "frontend.device") in edges
    assert ("frontend.tensor", "frontend.capture") in edges
    assert _rank("graph.node") < _rank("semantics.scopes") < _rank("report.stats") < _rank("execute.executable")


def test_the_graph_layer_knows_nothing_of_recording() -> None:
    """Data: it imports PyTorch, the C++ half, facts of operators, a mapping and itself, and nothing else of marid."""
    edges = _edges(everywhere=True)
    below = "graph", "native", "ops", "recent"
    outside = [(a, b) for a, b in edges if a.startswith("graph") and not b.startswith(below)]
    assert not outside


def test_clients_and_workers_share_the_wire_only() -> None:
    """Neither imports the other, nor what starts them; the wire imports none of these."""
    sides = ["client", "worker"]
    allowed = {"wire": ["wire"], "launch": ["wire", "launch", *sides]} | {side: ["wire", side] for side in sides}
    edges = [(a.split("."), b.split(".")) for a, b in _edges(everywhere=True)]
    inside = [(a, b) for a, b in edges if a[0] == b[0] == "remote" and len(a) > 2]
    assert {a[1] for a, _ in inside} == set(allowed)
    assert not [(a, b) for a, b in inside if b[1] not in allowed[a[1]]]


def test_a_file_is_one_idea() -> None:
    """What a reader can hold: 400 lines at most, in both halves."""
    files = [path for end in ("*.py", "*.cpp", "*.h") for path in ROOT.rglob(end) if "_built" not in path.parts]
    assert len(files) > 200
    assert not [str(path) for path in files if len(path.read_text().splitlines()) > 400]


def test_the_package_knows_no_benchmark() -> None:
    """Neither by an import nor by a name: what is measured is a user's program like any other."""
    assert not [path for path in ROOT.rglob("*.py") if re.search(r"benchmarks\b|contestant", path.read_text(), re.I)]


_FACTORIES = {"empty", "empty_strided", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "asarray", "rand"}


def _says_nowhere(node: ast.AST) -> bool:
    """Whether it is a call like ``torch.empty(3)``."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in _FACTORIES
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    )


def test_factories_say_where() -> None:
    """A user's ``torch.set_default_device`` also holds for calls in here, wherever they are not below all dispatch."""
    own = [path for path in ROOT.rglob("*.py") if "models" not in path.relative_to(ROOT).parts]
    nodes = [(path.name, node) for path in own for node in ast.walk(ast.parse(path.read_text()))]
    assert not [f"{name}:{node.lineno}" for name, node in nodes if _says_nowhere(node)]  # pyright: ignore[reportAttributeAccessIssue]
