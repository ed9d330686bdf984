"""Parts of random networks that mix positions or branches: attention, recurrence, rearranging, embeddings, gates."""

from __future__ import annotations

from .layers import layer
from .writer import Kind, Unfit, Writer

__all__ = ["MIXERS"]

Text = tuple[tuple[str, ...], tuple[str, ...]]


def _sequence(w: Writer) -> tuple[int, int]:
    """Length and width of the activation as (N, T, D)."""
    if w.x.dim() != 3 or w.shape[0] > 256:
        raise Unfit
    return w.shape[0], w.shape[1]


# --- attention -------------------------------------------------------------------------------------------------------


def _attend(w: Writer, heads: int, width: int, length: int) -> str:
    """Text that attends with ``q``, ``k``, ``v`` of shape (N, heads, T, width)."""
    causal = f"torch.ones({length}, {length}, device=x.device).tril()"
    scores = w.one("q @ k.transpose(-2, -1)", "torch.einsum('bhid,bhjd->bhij', q, k)")
    scale = w.one(f"/ {width**0.5}", f"* {width**-0.5}")
    return w.one(
        "F.scaled_dot_product_attention(q, k, v)",
        "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        f"F.scaled_dot_product_attention(q, k, v, attn_mask={causal}.bool())",
        f"F.scaled_dot_product_attention(q, k, v, attn_mask={causal}.to(q.dtype))",
        "F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)",
        f"({scores} {scale}).softmax(-1) @ v",
        f"F.softmax({scores} {scale}, dim=-1) @ v",
        f"F.dropout(({scores} {scale}).softmax(-1), 0.1, self.training) @ v",
        f"torch.where({causal} > 0, {scores} {scale}, -1e4).softmax(-1) @ v",
        f"torch.einsum('bhij,bhjd->bhid', ({scores} {scale}).softmax(-1), v)",
        "F.normalize(q, dim=-1) @ (F.normalize(k, dim=-2).transpose(-2, -1) @ v)",
    )


def attention(w: Writer) -> Text:
    """Self-attention of a sequence, in one of its usual spellings."""
    length, width = _sequence(w)
    heads = w.divisor(width) if width <= 64 else 1
    size = width // heads
    name, out = w.new("qkv"), w.new("out")
    init = (f"self.{name} = nn.Linear({width}, {3 * width})", f"self.{out} = nn.Linear({width}, {width})")
    split = w.one(
        (
            f"q, k, v = self.{name}(x).chunk(3, -1)",
            f"q, k, v = (t.view(-1, {length}, {heads}, {size}).transpose(1, 2) for t in (q, k, v))",
        ),
        (f"q, k, v = self.{name}(x).view(-1, {length}, 3, {heads}, {size}).permute(2, 0, 3, 1, 4)",),
        (f"q, k, v = self.{name}(x).reshape(-1, {length}, 3, {heads}, {size}).transpose(1, 3).unbind(2)",),
        (
            f"q, k, v = self.{name}(x).split({width}, dim=2)",
            f"q, k, v = (t.unflatten(-1, ({heads}, {size})).transpose(1, 2) for t in (q, k, v))",
        ),
    )
    joined = w.one(
        f"x = self.{out}(a.transpose(1, 2).reshape(-1, {length}, {width}))",
        f"x = self.{out}(a.transpose(1, 2).contiguous().view(-1, {length}, {width}))",
        f"x = self.{out}(a.transpose(1, 2).flatten(2))",
    )
    residual = w.one((), ("x = x + y",))
    return init, ("y = x", *split, f"a = {_attend(w, heads, size, length)}", joined, *residual)


def image_attention(w: Writer) -> Text:
    """The attention of diffusion models and non-local networks, on flattened feature maps."""
    w.spatial(2)
    channels, height, width = w.shape
    if height * width > 256:
        raise Unfit
    flat = height * width
    q, k, v = w.new("q"), w.new("k"), w.new("v")
    reshaped = w.one(f"reshape(-1, {channels}, {flat}).transpose(1, 2)", "flatten(2).transpose(1, 2)", "flatten(2).mT")
    back = f"transpose(1, 2).reshape(-1, {channels}, {height}, {width})"
    if w.chance(50):
        init = tuple(f"self.{n} = nn.Linear({channels}, {channels})" for n in (q, k, v))
        made = (f"y = x.{reshaped}", f"q, k, v = self.{q}(y), self.{k}(y), self.{v}(y)")
    else:
        init = tuple(f"self.{n} = nn.Conv2d({channels}, {channels}, 1)" for n in (q, k, v))
        made = (f"q, k, v = (f(x).{reshaped} for f in (self.{q}, self.{k}, self.{v}))",)
    made += ("q, k, v = q[:, None], k[:, None], v[:, None]",)
    back = w.one(back, back, f"mT.contiguous().view(-1, {channels}, {height}, {width})")
    end = w.one(f"x = a[:, 0].{back}", f"x = x + a[:, 0].{back}")
    after = ()
    if w.chance(50):
        project = w.new("project")
        init += (f"self.{project} = nn.Conv2d({channels}, {channels}, 1)",)
        after = (f"x = self.{project}(x)",)
    return init, (*made, f"a = {_attend(w, 1, channels, flat)}", end, *after)


def channel_attention(w: Writer) -> Text:
    """Attention between channels."""
    w.spatial()
    return (), ("q = x.flatten(2)", "x = ((q @ q.mT) / q.shape[-1]).softmax(-1).matmul(q).view_as(x)")


def multihead(w: Writer) -> Text:
    _, width = _sequence(w)
    heads = w.divisor(width) if width <= 64 else 1
    name = w.new("attention")
    first = w.chance(70)
    given = w.options(bias=(False,), dropout=(0.1,), add_bias_kv=(True,), add_zero_attn=(True,))
    init = f"self.{name} = nn.MultiheadAttention({width}, {heads}, batch_first={first}{given})"
    weights = w.options(50, need_weights=(False,), average_attn_weights=(False,))
    arguments = w.one("x, x, x", "x, x.flip(1), x.tanh()")
    return (init,), (f"x = self.{name}({arguments}{weights})[0]",)


def transformer(w: Writer) -> Text:
    _, width = _sequence(w)
    heads = w.divisor(width) if width <= 64 else 1
    kind = w.one("Encoder", "Encoder", "Decoder")
    given = w.options(dropout=(0.0,), activation=("gelu",), norm_first=(True,), bias=(False,))
    made = f"nn.Transformer{kind}Layer({width}, {heads}, {w.number(2, 24)}, batch_first=True{given})"
    return layer(w, "transformer", made, "x" if kind == "Encoder" else "x, x.flip(1)")


# --- recurrence ------------------------------------------------------------------------------------------------------


def recurrent(w: Writer) -> Text:
    length, width = _sequence(w)
    if length > 24:
        raise Unfit
    name, hidden = w.new("rnn"), w.number(1, 12)
    kind = w.one("LSTM", "LSTM", "GRU", "GRU", "RNN")
    given = w.options(num_layers=(2,), bidirectional=(True,), bias=(False,), dropout=(0.2,))
    given += w.options(proj_size=(max(1, hidden - 1),)) if kind == "LSTM" and hidden > 1 else ""
    given += w.options(nonlinearity=("relu",)) if kind == "RNN" else ""
    init = f"self.{name} = nn.{kind}({width}, {hidden}, batch_first={w.chance(75)}{given})"
    if "batch_first=True" in init and w.chance(15):
        lengths = f"[{length}] + [1] * (x.shape[0] - 1)"
        packed = f"nn.utils.rnn.pack_padded_sequence(x, {lengths}, batch_first=True)"
        return (init,), (f"x = nn.utils.rnn.pad_packed_sequence(self.{name}({packed})[0], batch_first=True)[0]",)
    return (init,), (f"x, h = self.{name}(x)",)


def cell(w: Writer) -> Text:
    """A cell in a Python loop."""
    length, width = _sequence(w)
    if length > 12:
        raise Unfit
    name, hidden = w.new("cell"), w.number(1, 10)
    kind = w.one("LSTM", "GRU", "RNN")
    init = f"self.{name} = nn.{kind}Cell({width}, {hidden}{w.options(bias=(False,))})"
    state = f"x.new_zeros(x.shape[0], {hidden})"
    start = f"h = ({state}, {state})" if kind == "LSTM" else f"h = {state}"
    steps = w.one("x.unbind(1)", f"[x[:, t] for t in range({length})]", "x.transpose(0, 1)")
    seen = "h[0]" if kind == "LSTM" else "h"
    end = w.one("x = torch.stack(seen, 1)", "x = torch.cat([s.unsqueeze(1) for s in seen], 1)", f"x = {seen}")
    loop = f"for t in {steps}:\n    h = self.{name}(t, h)\n    seen.append({seen})"
    return (init,), (start, "seen = []", loop, end)


# --- embeddings ------------------------------------------------------------------------------------------------------


def embedding(w: Writer) -> Text:
    """Adds learned vectors of tokens to a sequence, or multiplies by those of bags of tokens."""
    if w.x.dim() not in (2, 3):
        raise Unfit
    name, width = w.new("embedding"), w.shape[-1]
    count = w.number(2, 11)
    options = w.options(20, padding_idx=(0, 1), scale_grad_by_freq=(True,), max_norm=(1.0,))
    if w.x.dim() == 3:
        index = f"(torch.arange(x.shape[0] * x.shape[1], device=x.device) * 5 % {count}).view(x.shape[:2])"
        return (f"self.{name} = nn.Embedding({count}, {width}{options})",), (f"x = x + self.{name}({index})",)
    index = f"(torch.arange(x.shape[0] * 3, device=x.device) * 5 % {count}).view(-1, 3)"
    mode = w.options(60, mode=("sum", "mean", "max"))
    options = "" if "mode='max'" in mode else options
    return (f"self.{name} = nn.EmbeddingBag({count}, {width}{options}{mode})",), (f"x = x * self.{name}({index})",)


def positions(w: Writer) -> Text:
    name = w.new("position")
    sizes = [size if w.chance(70) else 1 for size in w.shape]
    how = w.one("x + self.{0}", "x * (1 + self.{0})", "x + self.{0}.expand_as(x)", "torch.add(x, self.{0}, alpha=0.5)")
    return (f"self.{name} = nn.Parameter(torch.randn({', '.join(map(str, sizes))}) * 0.1)",), (
        f"x = {how.format(name)}",
    )


# --- rearranging -----------------------------------------------------------------------------------------------------


def rearrangement(w: Writer) -> Text:
    """Views and copies that leave the number of dimensions as it is."""
    rank = w.x.dim()
    a, b = w.number(1, rank - 1), w.number(1, rank - 1)
    size = w.x.shape[a]
    options = [
        f"x.transpose({a}, {b})",
        f"x.transpose({a}, {b}).contiguous()",
        f"x.flip({a})",
        f"x.roll({w.number(1, 3)}, {a})",
        f"x.unfold({a}, {w.number(1, min(3, size))}, {w.number(1, 2)}).mean(-1)",
        f"torch.cat([x, x.tanh()], {a})",
        f"torch.cat(x.chunk({w.number(2, 3)}, {a})[::-1], {a})",
        "torch.stack([x, x.sin()], 1).flatten(1, 2)",
        "torch.stack([x, x * 2], -1).mean(-1)",
        f"x.narrow({a}, {w.number(0, size - 1)}, 1)",
        f"x[{', '.join([':'] * a)}, ::2]",
        f"x.index_select({a}, torch.arange({size - 1}, -1, -1, device=x.device))",
        f"x.repeat_interleave(2, {a})",
        "x.reshape(x.shape[0], -1).view(x.shape)",
        f"x.transpose({a}, {b}).reshape(x.shape)",
        f"x.cumsum({a})",
        f"x.sort({a})[0]",
        f"x.topk({w.number(1, size)}, {a})[0]",
        f"x.diff(dim={a})",
        "x.expand(2, *x.shape).mean(0)",
        f"x.split({w.number(1, size)}, {a})[0]",
        "x.clone(memory_format=torch.contiguous_format)",
    ]
    if rank == 4:
        options += [
            "F.pixel_shuffle(x, 2)",
            "F.pixel_unshuffle(x, 2)",
            f"F.channel_shuffle(x, {w.divisor(w.shape[0])})",
            f"nn.ChannelShuffle({w.divisor(w.shape[0])})(x)",
            "x.contiguous(memory_format=torch.channels_last)",
            "x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)",
            "x.permute(0, 1, 3, 2)",
            "torch.rot90(x, 1, (2, 3))",
            f"x.flatten(2).transpose(1, 2).reshape(-1, {w.shape[1]}, {w.shape[2]}, {w.shape[0]}).permute(0, 3, 1, 2)",
        ]
    return (), (f"x = {w.one(*options)}",)


def reshaping(w: Writer) -> Text:
    """From images to sequences, vectors and back."""
    rank, sizes = w.x.dim(), w.shape
    options = ["x.flatten(1)", "x.flatten(2)", "x.mean(-1)", "x.amax(-1)", "x.logsumexp(-1)", "x[..., 0]"]
    options += ["x.flatten(2).transpose(1, 2)", "x.movedim(1, -1).flatten(1, -2)", "x.unsqueeze(-1)", "x.unsqueeze(1)"]
    options += ["x.flatten(2).mean(2)", "x.std(-1)"]
    a = w.number(1, rank - 1)
    first = w.divisor(sizes[a - 1])
    options += [f"x.unflatten({a}, ({first}, {sizes[a - 1] // first}))"] * 3
    if rank == 3:
        height = w.divisor(sizes[0])
        width = sizes[0] // height
        options += [f"x.transpose(1, 2).reshape(-1, {sizes[1]}, {height}, {width})"] * 2
        options += [f"x.transpose(1, 2).unflatten(2, ({height}, {width}))"]
    return (), (f"x = {w.one(*options)}",)


# --- branches --------------------------------------------------------------------------------------------------------


def save(w: Writer) -> Text:
    """Keeps the activation for a branch that comes together again later."""
    name = w.new("saved")
    w.saved[name] = w.shape
    return (), (f"{name} = {w.one('x', 'x', 'x', 'x.clone()')}",)


def join(w: Writer) -> Text:
    """Adds, gates or concatenates what was saved."""
    if not w.saved:
        raise Unfit
    name = w.one(*w.saved)
    old, shape = w.saved[name], w.shape
    if old == shape:
        how = w.one(f"x + {name}", f"{name} + x", f"x * {name}.sigmoid()", f"torch.cat([x, {name}], 1)", f"x - {name}")
        how = w.one(how, f"x.add_({name})", f"torch.cat([{name}, x], -1)", f"torch.stack([x, {name}]).sum(0)")
    elif len(old) == len(shape) and old[1:] == shape[1:]:
        how = f"torch.cat([{name}, x], 1)"
    elif len(old) == len(shape) and len(old) == 3:
        how = f"x + F.interpolate({name}, x.shape[2:]).mean(1, keepdim=True)"
    else:
        how = f"x * {name}.flatten(1).mean(1).sigmoid().view(-1{', 1' * len(shape)})"
    return (), (f"x = {how}",)


def squeeze_excite(w: Writer) -> Text:
    dims, channels = w.spatial(), w.shape[0]
    name, inner = w.new("excite"), w.number(1, 6)
    if w.chance(50):
        made = (
            f"nn.Conv{dims}d({channels}, {inner}, 1), nn.ReLU(), nn.Conv{dims}d({inner}, {channels}, 1), nn.Sigmoid()"
        )
        init = f"self.{name} = nn.Sequential(nn.AdaptiveAvgPool{dims}d(1), {made})"
        return (init,), (f"x = x * self.{name}(x)",)
    made = f"nn.Linear({channels}, {inner}), nn.SiLU(), nn.Linear({inner}, {channels}), nn.Hardsigmoid()"
    scale = f"self.{name}(x.flatten(2).mean(2)).view(-1, {channels}{', 1' * dims})"
    return (f"self.{name} = nn.Sequential({made})",), (f"x = x * {scale}",)


def gate(w: Writer) -> Text:
    if w.shape[0] % 2:
        raise Unfit
    how = w.one("a * b.sigmoid()", "a * F.gelu(b)", "F.silu(a) * b", "torch.cat([b, a], 1)", "a.exp() * 0.1 + b")
    return (), ("a, b = x.chunk(2, 1)", f"x = {how}")


def tied(w: Writer) -> Text:
    """Two layers with one weight."""
    first, second, inner = w.new("tied"), w.new("tied"), w.number(1, 12)
    size = w.shape[-1]
    if w.chance(50):
        init = (f"self.{first} = nn.Linear({size}, {inner})",)
        return init, (f"x = F.linear(torch.tanh(self.{first}(x)), self.{first}.weight.t())",)
    init = (
        f"self.{first} = nn.Linear({size}, {size})",
        f"self.{second} = nn.Linear({size}, {size})",
        f"self.{second}.weight = self.{first}.weight",
    )
    return init, (f"x = self.{second}(F.relu(self.{first}(x)))",)


def dense(w: Writer) -> Text:
    """Concatenates each layer's output to what came before."""
    dims, channels = w.spatial(), w.shape[0]
    growth = w.number(1, 4)
    names = [w.new("dense") for _ in range(2)]
    init = tuple(
        f"self.{name} = nn.Conv{dims}d({channels + growth * number}, {growth}, 3, padding=1)"
        for number, name in enumerate(names)
    )
    return init, tuple(f"x = torch.cat([x, F.relu(self.{name}(x))], 1)" for name in names)


def checkpointed(w: Writer) -> Text:
    name, size = w.new("part"), w.shape[-1]
    noise = w.one("nn.Dropout(0.2), ", "")
    made = f"nn.Sequential(nn.Linear({size}, {size}), nn.Tanh(), {noise}nn.Linear({size}, {size}))"
    call = f"torch.utils.checkpoint.checkpoint(self.{name}, x, use_reentrant={w.chance(20)})"
    return (f"self.{name} = {made}",), (f"x = {call}",)


MIXERS: tuple[tuple[Kind, int], ...] = (
    (attention, 6),
    (image_attention, 5),
    (channel_attention, 1),
    (multihead, 3),
    (transformer, 2),
    (recurrent, 4),
    (cell, 2),
    (embedding, 2),
    (positions, 2),
    (rearrangement, 9),
    (reshaping, 6),
    (save, 4),
    (join, 7),
    (squeeze_excite, 2),
    (gate, 2),
    (tied, 1),
    (dense, 2),
    (checkpointed, 2),
)
