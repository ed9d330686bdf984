"""Parts of random networks that take, set or add positions of one dimension by indices."""

from __future__ import annotations

from .writer import Kind, Writer

__all__ = ["INDEXING"]

Text = tuple[tuple[str, ...], tuple[str, ...]]


def _indices(w: Writer, dim: int) -> tuple[str, tuple[str, ...], bool]:
    """Indices of positions: an expression, what it needs, and whether some may come twice."""
    size, rank = w.shape[dim - 1], w.x.dim()
    name, count = w.new("index"), w.number(1, size)
    if w.chance(50):
        twice = w.chance(50)
        made = f"torch.randint({size}, ({count},))" if twice else f"torch.randperm({size})[:{count}]"
        return f"self.{name}", (f"self.register_buffer({name!r}, {made})",), twice
    others = tuple(d for d in range(rank) if d != dim)
    scores = f"(x.float().square().mean({others}) + torch.arange({size}, device=x.device) * 1e-3)"
    return f"{scores}.{w.one(f'argsort(stable=True)[:{count}]', f'topk({count}).indices')}", (), False


def indexing(w: Writer) -> Text:
    rank = w.x.dim()
    dim = w.number(1, rank - 1)
    size, before, behind = w.shape[dim - 1], ":, " * dim, ", 1" * (rank - 1 - dim)
    indices, init, twice = _indices(w, dim)
    each = f"i.view({'1, ' * dim}-1{behind}).expand(*x.shape[:{dim}], -1, *x.shape[{dim + 1}:])"
    chosen = f"(torch.arange({size}, device=x.device)[:, None] == i).any(1).view(-1{behind})"
    taken = w.one(
        f"x[{before}i]",
        f"x.index_select({dim}, i)",
        f"x.gather({dim}, {each})",
        f"torch.take_along_dim(x, {each}, {dim})",
    )
    one_hot = f"F.one_hot(i, {size}).to(x.dtype)"
    reduced = w.one("amax", "amin", "mean", "sum")
    changed = w.one(
        f"torch.zeros_like(x).index_add({dim}, i, {taken})",
        f"x.index_add({dim}, i, {taken}, alpha=0.5)",
        f"x.scatter_add({dim}, {each}, {taken} * 0.5)",
        f"x.scatter({dim}, {each}, 0.25)",
        f"x.scatter_reduce({dim}, {each}, torch.tanh({taken}), {reduced!r})",
        f"x.index_fill({dim}, i, 0.5)",
        f"x.index_copy({dim}, i[:1], x.narrow({dim}, 0, 1) * 2)",
        "x.index_put((torch.arange(len(x), device=x.device),), x.flip(0) * 0.5, accumulate=True)",
        f"torch.where({chosen}, x, -x)",
        f"x.masked_fill({chosen}, 0.1)",
        f"{one_hot} @ x.movedim({dim}, -2)" if rank > 2 else f"x @ {one_hot}.mT",
    )
    written = w.one(
        (f"x = {taken}",),
        (f"x = {changed}",),
        ("y = x.clone()", f"y[{before}i] = {'0.5' if twice else f'{taken} * 0.5'}", "x = y"),
        ("y = x * 1.5", f"y[{before}i] += 1.0", "x = y"),
    )
    return init, (f"i = {indices}", *written)


INDEXING: tuple[tuple[Kind, int], ...] = ((indexing, 4),)
