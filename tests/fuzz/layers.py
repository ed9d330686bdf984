"""Layers that random networks are made of: convolutions, norms, pools, activations, and those of vectors."""

from __future__ import annotations

from .writer import Kind, Unfit, Writer

__all__ = ["LAYERS"]

Text = tuple[tuple[str, ...], tuple[str, ...]]


def layer(w: Writer, kind: str, made: str, call: str = "x") -> Text:
    """A module and its call."""
    name = w.new(kind)
    return (f"self.{name} = {made}",), (f"x = self.{name}({call})",)


def _sizes(w: Writer, count: int, low: int, high: int) -> str:
    """One number for all dimensions, or one for each."""
    return str(w.number(low, high)) if w.chance(70) else str(tuple(w.number(low, high) for _ in range(count)))


# --- convolutions ----------------------------------------------------------------------------------------------------

_PADDING_MODES = ("zeros", "zeros", "zeros", "circular", "reflect", "replicate")


def convolution(w: Writer) -> Text:
    dims, channels = w.spatial(), w.shape[0]
    groups = w.one(1, 1, 1, channels, w.divisor(channels))
    out = groups * w.number(1, max(1, 12 // groups))
    kernel = "1" if w.chance(35) else _sizes(w, dims, 1, 5)
    made = f"nn.Conv{dims}d({channels}, {out}, {kernel}" + (f", groups={groups}" if groups > 1 else "")
    if w.chance(25):
        made += w.options(padding=("same", "valid"))
    else:
        made += w.options(45, stride=(2, 2, 3), padding=(1, 1, 2))
    made += w.options(20, dilation=(2, 3), bias=(False,), padding_mode=_PADDING_MODES)
    return layer(w, "conv", made + ")")


def transposed_convolution(w: Writer) -> Text:
    dims, channels = w.spatial(), w.shape[0]
    groups = w.one(1, 1, w.divisor(channels))
    out = groups * w.number(1, max(1, 8 // groups))
    made = f"nn.ConvTranspose{dims}d({channels}, {out}, {_sizes(w, dims, 1, 4)}, groups={groups}"
    made += w.options(40, stride=(2, 3), padding=(1,), dilation=(2,), output_padding=(1,), bias=(False,))
    return layer(w, "up", made + ")")


def separable_convolution(w: Writer) -> Text:
    dims, channels = w.spatial(), w.shape[0]
    depth, point, kernel = w.new("depth"), w.new("point"), w.one(3, 3, 5)
    init = (
        f"self.{depth} = nn.Conv{dims}d({channels}, {channels}, {kernel}, padding={kernel // 2}, groups={channels}"
        f"{w.options(bias=(False,), stride=(2,))})",
        f"self.{point} = nn.Conv{dims}d({channels}, {w.number(1, 16)}, 1{w.options(bias=(False,))})",
    )
    return init, (f"x = self.{point}(self.{depth}(x))",)


def functional_convolution(w: Writer) -> Text:
    """With a weight that is a view."""
    dims, channels = w.spatial(), w.shape[0]
    name, out, kernel = w.new("weight"), w.number(1, 8), w.number(1, 3)
    kernels = [kernel] * dims
    sizes, view = w.one(
        ([out, channels, *kernels], ""),
        ([channels, out, *kernels], ".transpose(0, 1)"),
        ([out, channels, *kernels], ".flip(-1)"),
        ([out, *kernels, channels], ".movedim(-1, 1)"),
    )
    scale = (channels * kernel**dims) ** -0.5
    init = f"self.{name} = nn.Parameter(torch.randn({', '.join(map(str, sizes))}) * {scale:.3f})"
    return (init,), (f"x = F.conv{dims}d(x, self.{name}{view}{w.options(stride=(2,), padding=(1,))})",)


def unfolded_convolution(w: Writer) -> Text:
    """A convolution as a product of unfolded patches."""
    w.spatial(2)
    channels, height, width = w.shape
    name, out, kernel = w.new("weight"), w.number(1, 6), w.one(1, 3)
    init = f"self.{name} = nn.Parameter(torch.randn({out}, {channels * kernel**2}) * 0.2)"
    patches = f"F.unfold(x, {kernel}, padding={kernel // 2})"
    if w.chance(50):
        return (init,), (f"x = (self.{name} @ {patches}).view(-1, {out}, {height}, {width})",)
    return (), (f"x = F.fold({patches}, ({height}, {width}), {kernel}, padding={kernel // 2})",)


# --- norms -----------------------------------------------------------------------------------------------------------


def batch_norm(w: Writer) -> Text:
    dims = w.x.dim() - 2
    if not 0 <= dims <= 3:
        raise Unfit
    given = w.options(affine=(False,), track_running_stats=(False,), momentum=(None, 0.5), eps=(0.01,))
    return layer(w, "norm", f"nn.BatchNorm{max(dims, 1)}d({w.shape[0]}{given})")


def group_norm(w: Writer) -> Text:
    channels = w.shape[0]
    given = w.options(affine=(False,), eps=(0.01,))
    return layer(w, "norm", f"nn.GroupNorm({w.divisor(channels)}, {channels}{given})")


def layer_norm(w: Writer) -> Text:
    if w.chance(30) and w.x.dim() == 4:
        made = f"nn.LayerNorm({w.shape[0]}{w.options(bias=(False,))})"
        name = w.new("norm")
        return (f"self.{name} = {made}",), (f"x = self.{name}(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)",)
    sizes = list(w.shape[-w.number(1, len(w.shape)) :])
    return layer(w, "norm", f"nn.LayerNorm({sizes}{w.options(elementwise_affine=(False,), bias=(False,))})")


def rms_norm(w: Writer) -> Text:
    sizes = list(w.shape[-w.number(1, len(w.shape)) :])
    return layer(w, "norm", f"nn.RMSNorm({sizes}{w.options(elementwise_affine=(False,), eps=(1e-3,))})")


def instance_norm(w: Writer) -> Text:
    given = w.options(40, affine=(True,), track_running_stats=(True,))
    return layer(w, "norm", f"nn.InstanceNorm{w.spatial()}d({w.shape[0]}{given})")


def other_norm(w: Writer) -> Text:
    w.spatial()
    how = w.one(
        f"nn.LocalResponseNorm({w.number(1, 4)})(x)",
        f"F.normalize(x, dim={w.number(1, w.x.dim() - 1)})",
        "x / (x.square().mean(1, keepdim=True) + 1e-2).sqrt()",
        "(x - x.mean((2,), keepdim=True)) / (x.var((2,), keepdim=True, unbiased=False) + 0.1).sqrt()",
        "x / (torch.linalg.vector_norm(x, dim=1, keepdim=True) + 0.1)",
    )
    return (), (f"x = {how}",)


# --- pools and resizing ----------------------------------------------------------------------------------------------


def pool(w: Writer) -> Text:
    dims = w.spatial()
    kernel = w.number(1, 3)
    given = w.options(40, stride=(1, 2, 3), ceil_mode=(True,))
    padding = w.options(padding=(kernel // 2,))
    made = w.one(
        f"nn.MaxPool{dims}d({kernel}{given}{padding}{w.options(dilation=(2,))})",
        f"nn.AvgPool{dims}d({kernel}{given}{padding}{w.options(count_include_pad=(False,))})",
        f"nn.LPPool{dims}d(2, {kernel}{given})",
        f"nn.AdaptiveAvgPool{dims}d({w.number(1, 4)})",
        f"nn.AdaptiveMaxPool{dims}d({w.number(1, 4)})",
        f"nn.FractionalMaxPool{max(dims, 2)}d({kernel}, output_ratio={w.one(0.5, 0.7)})",
    )
    return layer(w, "pool", made)


def unpool(w: Writer) -> Text:
    dims = w.spatial()
    down, up = w.new("pool"), w.new("unpool")
    init = (
        f"self.{down} = nn.MaxPool{dims}d(2, return_indices=True)",
        f"self.{up} = nn.MaxUnpool{dims}d(2)",
    )
    between = w.one("p", "p.tanh()", "p * 2")
    return init, (f"p, i = self.{down}(x)", f"x = self.{up}({between}, i, output_size=x.shape)")


def interpolation(w: Writer) -> Text:
    dims = w.spatial()
    mode = w.one("nearest", "nearest-exact", "area", ("linear", "bilinear", "trilinear")[dims - 1], "bicubic")
    size = w.one(
        "scale_factor=2", "scale_factor=0.5", "scale_factor=1.5", f"size={[w.number(1, 9) for _ in range(dims)]}"
    )
    linear = mode not in ("nearest", "nearest-exact", "area")
    given = w.options(40, align_corners=(True,), antialias=(mode in ("bilinear", "bicubic"),)) if linear else ""
    return (), (f'x = F.interpolate(x, {size}, mode="{mode}"{given})',)


def padding(w: Writer) -> Text:
    dims = w.spatial()
    sides = [w.number(0, 2) for _ in range(2 * dims)]
    kind = w.one("Constant", "Zero", "Reflection", "Replication", "Circular")
    value = ", 0.5" if kind == "Constant" else ""
    return layer(w, "pad", f"nn.{kind}Pad{dims}d({tuple(sides)}{value})")


def sampling(w: Writer) -> Text:
    """A small affine warp."""
    w.spatial(2)
    name = w.new("warp")
    init = f"self.{name} = nn.Parameter(torch.eye(2, 3) + 0.05 * torch.randn(2, 3))"
    grid = f"F.affine_grid(self.{name}.expand(x.shape[0], 2, 3), x.shape, align_corners=False)"
    given = w.options(40, mode=("nearest", "bicubic"), padding_mode=("border", "reflection"))
    return (init,), (f"x = F.grid_sample(x, {grid}, align_corners=False{given})",)


# --- activations and noise -------------------------------------------------------------------------------------------

_ACTIVATIONS = (
    "ReLU() ReLU() ReLU6() LeakyReLU(0.1) ELU() SELU() CELU(0.5) GELU() GELU(approximate='tanh') SiLU() SiLU() Mish() "
    "Hardswish() Hardsigmoid() Hardtanh() Tanh() Sigmoid() LogSigmoid() Softplus() Softsign() Tanhshrink() "
    "Softshrink(0.2) Hardshrink(0.2) Threshold(0.1,0.0) PReLU() RReLU() Softmax(1) Softmax(-1) Softmin(1) LogSoftmax(1)"
).split()
_FUNCTIONS = (
    "F.relu(x) F.gelu(x) F.silu(x) torch.tanh(x) torch.sigmoid(x) torch.sin(x) x.clamp(-1,1) F.relu(x).square() "
    "x*torch.sigmoid(1.702*x) torch.where(x>0,x,0.1*x) x.abs().sqrt() torch.exp(-x*x) F.softplus(x)*x x.clamp_min(0) "
    "torch.maximum(x,x*0.2) torch.atan(x) torch.erf(x) F.gumbel_softmax(x,dim=1) x.softmax(-1) F.rrelu(x) "
    "torch.addcmul(x,x,x,value=0.5) torch.lerp(x,x.tanh(),0.3) torch.logaddexp(x,-x) x.sign()*x.abs().log1p()"
).split()
_IN_PLACE = "ReLU ReLU6 LeakyReLU ELU SELU CELU SiLU Mish Hardswish Hardsigmoid Hardtanh Threshold RReLU".split()


def activation(w: Writer) -> Text:
    if w.chance(40):
        return (), (f"x = {w.one(*_FUNCTIONS)}",)
    made = w.one(*_ACTIVATIONS, f"PReLU({w.shape[0]})", "GLU(1)", "Softmax2d()")
    if made.split("(")[0] in _IN_PLACE and w.blocks and w.chance(30):
        made = made.replace("()", "(inplace=True)") if made.endswith("()") else made[:-1] + ",inplace=True)"
    return layer(w, "act", f"nn.{made}")


def dropout(w: Writer) -> Text:
    names = ["Dropout", "Dropout", "AlphaDropout", "FeatureAlphaDropout"]
    if 1 <= w.x.dim() - 2 <= 3:
        names += [f"Dropout{w.x.dim() - 2}d"] * 2
    given = w.options(20, inplace=(True,)) if w.blocks else ""
    return layer(w, "drop", f"nn.{w.one(*names)}({w.one(0.1, 0.5)}{given})")


# --- vectors ---------------------------------------------------------------------------------------------------------


def linear(w: Writer) -> Text:
    return layer(w, "linear", f"nn.Linear({w.shape[-1]}, {w.number(1, 24)}{w.options(bias=(False,))})")


def channels_linear(w: Writer) -> Text:
    """A linear layer over channels, with the channels moved to the end and back."""
    dims = w.spatial()
    name, out = w.new("linear"), w.number(1, 12)
    to = (0, *range(2, dims + 2), 1)
    back = (0, dims + 1, *range(1, dims + 1))
    init = f"self.{name} = nn.Linear({w.shape[0]}, {out}{w.options(bias=(False,))})"
    return (init,), (f"x = self.{name}(x.permute{to}).permute{back}",)


def bilinear(w: Writer) -> Text:
    return layer(w, "bilinear", f"nn.Bilinear({w.shape[-1]}, {w.shape[-1]}, {w.number(1, 6)})", "x, x.tanh()")


def product(w: Writer) -> Text:
    """A product with a parameter, in one of its spellings."""
    name, size, out = w.new("matrix"), w.shape[-1], w.number(1, 12)
    init = f"self.{name} = nn.Parameter(torch.randn({size}, {out}) * 0.3)"
    how = w.one(
        f"x @ self.{name}",
        f"torch.einsum('...i,ij->...j', x, self.{name})",
        f"torch.tensordot(x, self.{name}, 1)",
        f"F.linear(x, self.{name}.t())",
        f"(self.{name}.t() @ x.transpose(-1, -2)).transpose(-1, -2)",
    )
    return (init,), (f"x = {how}",)


def multilayer(w: Writer) -> Text:
    inner = w.number(1, 32)
    act = w.one("GELU", "ReLU", "SiLU")
    size = w.shape[-1]
    return layer(w, "mlp", f"nn.Sequential(nn.Linear({size}, {inner}), nn.{act}(), nn.Linear({inner}, {size}))")


def parametrized(w: Writer) -> Text:
    """A layer whose weight is computed from other parameters."""
    how = w.one("weight_norm", "spectral_norm", "orthogonal", "weight_norm", "spectral_norm")
    if w.x.dim() in (3, 4, 5) and w.chance(60):
        made = f"nn.Conv{w.x.dim() - 2}d({w.shape[0]}, {w.number(1, 6)}, {w.one(1, 3)}, padding=1)"
    else:
        made = f"nn.Linear({w.shape[-1]}, {w.number(1, 12)})"
    owner = "parametrizations." if how == "orthogonal" or w.chance(70) else ""
    return layer(w, "normed", f"nn.utils.{owner}{how}({made})")


LAYERS: tuple[tuple[Kind, int], ...] = (
    (convolution, 12),
    (transposed_convolution, 4),
    (separable_convolution, 2),
    (functional_convolution, 2),
    (unfolded_convolution, 1),
    (batch_norm, 4),
    (group_norm, 4),
    (layer_norm, 3),
    (rms_norm, 2),
    (instance_norm, 3),
    (other_norm, 2),
    (pool, 5),
    (unpool, 2),
    (interpolation, 4),
    (padding, 2),
    (sampling, 1),
    (activation, 8),
    (dropout, 3),
    (linear, 3),
    (channels_linear, 2),
    (bilinear, 1),
    (product, 2),
    (multilayer, 2),
    (parametrized, 3),
)
