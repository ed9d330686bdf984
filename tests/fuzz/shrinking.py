"""Taking out of a network what a difference does not need, and printing the rest as a script."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import replace

import marid

from .networks import DEVICE, Network, Tier, check, source
from .observed import Difference
from .writer import Block

__all__ = ["minimised", "script"]

_PARTS = ("after", "before", "step", "setup", "inputs")


def minimised(net: Network, difference: Difference, tier: Tier, device: str = DEVICE, tries: int = 600) -> Network:
    """A smaller network with a difference like the given one; at most so many are tried."""

    def differs(candidate: Network) -> bool:
        return any(one.is_like(difference) for one in check(candidate, tier, device))

    changed = True
    while changed:
        changed = False
        for candidate in _smaller(net):
            if tries == 0:
                return net
            tries -= 1
            if differs(candidate):
                net, changed = candidate, True
                break
    return net


def _smaller(net: Network) -> Iterator[Network]:
    """Networks with less in them, those with the least first."""
    yield from _with_fewer_blocks(net)
    yield from _with_less_training(net)
    yield from _with_simpler_statements(net)


# --- blocks ----------------------------------------------------------------------------------------------------------


def _with_fewer_blocks(net: Network) -> Iterator[Network]:
    count = len(net.blocks)
    for keep in sorted({count // 2, count - 2, count - 1}):
        if 0 < keep < count:
            yield replace(net, blocks=net.blocks[:keep])
            yield _from_block(net, count - keep)
    for index, block in enumerate(net.blocks):
        others = net.blocks[:index], net.blocks[index + 1 :]
        if block.before == block.after:
            yield replace(net, blocks=others[0] + others[1])
        elif block.init or "F.pad(x.flatten(1)" not in block.forward[0]:
            yield replace(net, blocks=(*others[0], _stand_in(block), *others[1]))


def _from_block(net: Network, index: int) -> Network:
    """The network without its first blocks: the input has the shape that their output had."""
    return replace(
        net,
        blocks=net.blocks[index:],
        training=replace(net.training, inputs=(_plain(net.blocks[index].before), *net.training.inputs[1:])),
    )


def _plain(shape: tuple[int, ...]) -> str:
    return f"x = torch.randn(batch, {', '.join(map(str, shape))}, generator=data).to(device, dtype)"


def _stand_in(block: Block) -> Block:
    """A block that only gives the activation its next shape."""
    more = math.prod(block.after) - math.prod(block.before)
    padded = f"F.pad(x.flatten(1), (0, {more}))" if more else "F.pad(x.flatten(1), (0, 0))"
    return replace(block, init=(), forward=(f"x = {padded}.view(-1, {', '.join(map(str, block.after))})",))


# --- training --------------------------------------------------------------------------------------------------------


def _with_less_training(net: Network) -> Iterator[Network]:
    t = net.training
    batches = t.batches
    for fewer in ((batches[0],), (batches[-1],), batches[1:], batches[:-1], (max(batches),) * len(batches)):
        if fewer and fewer != batches:
            yield replace(net, training=replace(t, batches=fewer))
    for name in ("optimizer", "scheduler", "average"):
        dropped = {part: tuple(s for s in getattr(t, part) if name not in s) for part in _PARTS}
        if any(dropped[part] != getattr(t, part) for part in _PARTS):
            yield replace(net, training=replace(t, **dropped))
    for part in _PARTS:
        statements = getattr(t, part)
        for index in range(len(statements)):
            yield replace(net, training=replace(t, **{part: statements[:index] + statements[index + 1 :]}))
    if t.dtype != "torch.float32":
        yield replace(net, training=replace(t, dtype="torch.float32"))
    if net.blocks and t.inputs and t.inputs[0] != _plain(net.blocks[0].before):
        yield replace(net, training=replace(t, inputs=(_plain(net.blocks[0].before), *t.inputs[1:])))
    if "loss = out.sum()" not in t.step:
        step = tuple("loss = out.sum()" if re.match("loss = (?!loss)", s) else s for s in t.step)
        if step != t.step:
            yield replace(net, training=replace(t, step=step))


# --- statements ------------------------------------------------------------------------------------------------------


def _with_simpler_statements(net: Network) -> Iterator[Network]:
    for index, block in enumerate(net.blocks):
        for part in ("forward", "init"):
            for statements in _simpler_lists(getattr(block, part)):
                changed = replace(block, **{part: statements})
                yield replace(net, blocks=(*net.blocks[:index], changed, *net.blocks[index + 1 :]))
    for part in _PARTS:
        for statements in _simpler_lists(getattr(net.training, part)):
            yield replace(net, training=replace(net.training, **{part: statements}))


def _simpler_lists(statements: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for index, statement in enumerate(statements):
        if "generator=data" in statement:  # without it the numbers come from the generators, which are two
            continue
        before, after = statements[:index], statements[index + 1 :]
        if len(statements) > 1:
            yield before + after
        for simpler in _simpler(statement):
            yield (*before, simpler, *after)


class _Replaced(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST | list[ast.stmt]) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST | list[ast.stmt]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.new if node is self.old else self.generic_visit(node)


def _simpler(statement: str) -> Iterator[str]:
    """The statement with a call, an operand, a keyword or the header of a block left out."""
    for index in range(sum(1 for _ in ast.walk(ast.parse(statement)))):
        for choice in range(_choices(_node(statement, index)[1])):
            tree, node = _node(statement, index)
            _leave_out(tree, node, choice)
            yield ast.unparse(ast.fix_missing_locations(tree))


def _node(statement: str, index: int) -> tuple[ast.Module, ast.AST]:
    tree = ast.parse(statement)
    return tree, list(ast.walk(tree))[index]


def _choices(node: ast.AST) -> int:
    if isinstance(node, ast.Call):
        return len(node.keywords) + len(_inner(node))
    return 2 if isinstance(node, ast.BinOp) else 1 if isinstance(node, (ast.With, ast.For, ast.If, ast.IfExp)) else 0


def _inner(call: ast.Call) -> list[ast.expr]:
    """What may stand for a call: its receiver or arguments."""
    receiver = [call.func.value] if isinstance(call.func, ast.Attribute) else []
    return receiver + call.args[:1]


def _leave_out(tree: ast.Module, node: ast.AST, choice: int) -> None:
    if isinstance(node, ast.Call) and choice < len(node.keywords):
        del node.keywords[choice]
        return
    if isinstance(node, ast.Call):
        new: ast.AST | list[ast.stmt] = _inner(node)[choice - len(node.keywords)]
    elif isinstance(node, ast.BinOp):
        new = (node.left, node.right)[choice]
    else:
        assert isinstance(node, (ast.With, ast.For, ast.If, ast.IfExp))
        new = node.body
    _Replaced(node, new).visit(tree)


# --- printing --------------------------------------------------------------------------------------------------------

_SCRIPT = """\
import math

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import marid

{settings}

{source}

def as_it_is(step):
    return step


def run(device):
    seen = []

    def see(number, last, names):
        net, optimizer = names["net"], names.get("optimizer")
        found = {{name: names.get(name) for name in ("loss", "out")}}
        if names["x"].is_leaf:
            found["x.grad"] = names["x"].grad
        found.update(net.named_buffers())
        for name, parameter in net.named_parameters():
            found |= {{name: parameter, name + ".grad": parameter.grad}}
            for key, state in (optimizer.state.get(parameter, {{}}) if optimizer else {{}}).items():
                found[name + "." + key] = state
        for name, value in found.items():
            looks = (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, torch.Tensor) else None
            if looks and (last or {each_step}):
                value = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            seen.append((number, name, looks, value if last or {each_step} or not looks else None))

    try:
        train(device, {compiled} if device != "cpu" else as_it_is, see)
    except Exception as error:
        seen.append(("raises", type(error).__name__, None, str(error)))
    return seen


def equal(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.shape == b.shape:
        return torch.allclose(a.double(), b.double(), rtol={tolerance}, atol={tolerance}, equal_nan=True)
    return repr(a) == repr(b)


cpu, lazy = run("cpu"), run("{device}")
pairs = list(zip(cpu, lazy))
differ = [(a, b) for a, b in pairs if a[:3] != b[:3] or not equal(a[3], b[3])]
print("different" if differ or len(cpu) != len(lazy) else "equal")
for a, b in differ[:10]:
    print("cpu:", *a, "\\ndevice:", *b)
"""


def script(net: Network, tier: Tier, device: str = DEVICE) -> str:
    """A network as a Python script that trains it on both devices and prints what differs."""
    return _SCRIPT.format(
        source=source(tier.changes(net)),
        settings="\n".join(f"marid.settings.{name} = {value}" for name, value in tier.settings),
        compiled="marid.compile" if tier.compiled is marid.compile else "as_it_is",
        tolerance=tier.tolerance,
        each_step=net.each_step,
        device=device,
    )
