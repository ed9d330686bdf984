"""What stands in the user's source where an operation was recorded: worked out from the line when somebody asks.

The interpreter keeps, for every instruction, the columns that it was compiled from. Where the innermost module is one
of PyTorch's own, its name says more than a line inside of PyTorch could.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
from types import CodeType

from marid.semantics.scopes import Scope, Site

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.MatMult: "@", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>",
    ast.USub: "-", ast.Invert: "~", ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">",
    ast.GtE: ">=",
}  # fmt: skip


def written_as(site: Site | None, scope: Scope | None) -> str | None:
    """The name of what the user called: ``"nn.Linear"`` in the forward of one, else the function, method or operator of
    the line (``"torch.matmul"``, ``".softmax"``, ``"@"``); None where the source cannot be read."""
    if scope is not None and scope.module_class is not None and scope.module_class.startswith("torch.nn.modules."):
        return f"nn.{scope.module_type}"
    if site is None:
        return None
    innermost = site.package or site
    return _written(innermost.code, innermost.instruction)


@functools.lru_cache(4096)
def _written(code: CodeType, instruction: int) -> str | None:
    position = next(itertools.islice(code.co_positions(), instruction, None), None)
    if position is None or None in position:
        return None
    first, last, start, end = position
    lines = [linecache.getline(code.co_filename, number).encode() for number in range(first or 0, (last or 0) + 1)]
    if not lines or not lines[0]:
        return None
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    try:
        (tree,) = ast.parse(_unbroken(b"".join(lines))).body
    except (SyntaxError, ValueError):  # the file has changed
        return None
    return _name_of(tree.value if isinstance(tree, ast.Expr) else tree)


def _unbroken(text: bytes) -> bytes:
    """An expression that goes over several lines without parentheses of its own, as one."""
    return text.strip().replace(b"\n", b" ") if b"#" not in text else text.strip()


def _name_of(tree: ast.AST) -> str | None:
    if isinstance(tree, ast.AugAssign):
        return f"{_OPERATORS.get(type(tree.op), '')}="
    if isinstance(tree, ast.Call):
        return _dotted(tree.func)
    if isinstance(tree, (ast.BinOp, ast.UnaryOp)):
        return _OPERATORS.get(type(tree.op))
    if isinstance(tree, ast.Compare):
        return _OPERATORS.get(type(tree.ops[0]))
    if isinstance(tree, ast.Subscript):
        return "[]"
    return _dotted(tree) if isinstance(tree, ast.Attribute) else None


def _dotted(tree: ast.expr) -> str | None:
    """``torch.matmul``; of a method of anything that is more than a name, ``.softmax``."""
    names: list[str] = []
    at = tree
    while isinstance(at, ast.Attribute):
        names.append(at.attr)
        at = at.value
    if isinstance(at, ast.Name):
        return ".".join([at.id, *reversed(names)])
    return f".{names[0]}" if names else None
