"""``marid run --as-cuda``: scripts written for GPUs, run as they are."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

NANO_GPT_STYLE = """
    import inspect, os
    from contextlib import nullcontext
    import numpy as np, torch, torch.nn as nn

    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    assert device == 'cuda'
    dtype = 'bfloat16' if torch.cuda.is_bf16_supported() else 'float16'
    torch.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    device_type = 'cuda' if 'cuda' in device else 'cpu'
    ptdtype = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}[dtype]
    ctx = nullcontext() if device_type == 'cpu' else torch.amp.autocast(device_type=device_type, dtype=ptdtype)
    data = np.arange(512, dtype=np.uint16) % 17

    def get_batch():
        ix = torch.randint(len(data) - 8, (4,))
        x = torch.stack([torch.from_numpy(data[i:i+8].astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy(data[i+1:i+9].astype(np.int64)) for i in ix])
        if device_type == 'cuda':
            return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
        return x.to(device), y.to(device)

    model = nn.Sequential(nn.Embedding(17, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 17)).to(device)
    model = torch.compile(model)
    scaler = torch.cuda.amp.GradScaler(enabled=(dtype == 'float16'))
    fused = 'fused' in inspect.signature(torch.optim.AdamW).parameters and device_type == 'cuda'
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **(dict(fused=True) if fused else {}))
    losses = []
    for step in range(30):
        x, y = get_batch()
        with ctx:
            logits = model(x)
            loss = torch.nn.functional.cross_entropy(logits.view(-1, 17), y.view(-1))
        assert logits.dtype is torch.bfloat16 and loss.dtype is torch.float32
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    torch.cuda.synchronize()
    assert losses[-1].item() < losses[0].item() - 0.5, (losses[0], losses[-1])
    torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, 'ckpt.pt')
    loaded = torch.load('ckpt.pt', map_location=device)
    assert all(v.is_cuda for v in loaded['model'].values())
    loaded = torch.load('ckpt.pt')
    assert all(v.is_cuda for v in loaded['model'].values())
    assert not any(v.is_cuda for v in torch.load('ckpt.pt', map_location='cpu')['model'].values())
    model.load_state_dict(loaded['model'])
    optimizer.load_state_dict(loaded['optimizer'])
"""

CUDA_EVERYWHERE = """
    import torch, torch.nn as nn

    torch.cuda.set_device(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).cuda()
    assert next(net.parameters()).is_cuda and next(net.parameters()).device == torch.device('cuda', 0)
    criterion = nn.CrossEntropyLoss().cuda(0)
    x, y = torch.randn(16, 4).cuda(non_blocking=True), torch.randint(2, (16,)).cuda('cuda:0')
    assert x.is_cuda and str(x.device) == 'cuda:0' and x.device.type == 'cuda' and x.get_device() == 0
    assert not torch.zeros(1).is_cuda and torch.zeros(1).device.type == 'cpu'
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler('cuda')
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast('cuda'):
            assert torch.is_autocast_enabled() and torch.is_autocast_enabled('cuda')
            out = net(x)
            assert out.dtype is torch.float16
            loss = criterion(out, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert not torch.is_autocast_enabled('cuda')
    assert scaler.get_scale() == 65536.0
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0
    with torch.no_grad():
        print(out.float().cpu().numpy().shape, loss.item() > 0)
    mask = torch.ones(3, device='cuda', dtype=torch.bool)
    assert torch.where(mask, 1.0, torch.zeros_like(mask, dtype=torch.float, device=torch.device('cuda:0'))).sum() == 3
    assert torch.cat([x, x.new_zeros(1, 4)]).device == x.device
    with torch.device('cuda'):
        assert torch.zeros(2).is_cuda
    torch.set_default_device('cuda')
    assert torch.get_default_device().type == 'cuda' and torch.zeros(2).is_cuda
    torch.set_default_device('cpu')
    try:
        x + torch.ones(16, 4)
    except RuntimeError:
        pass
    else:
        raise AssertionError('a CPU tensor and a GPU tensor do not mix')
    for use in (lambda: torch.zeros(2, device='cuda:1'), lambda: x.to(torch.device('cuda', 1)), lambda: x.cuda(1),
                lambda: torch.cuda.set_device(1), lambda: torch.cuda.get_device_name('cuda:1')):
        try:
            use()
        except RuntimeError as error:
            assert 'invalid device ordinal' in str(error)
        else:
            raise AssertionError('there is one device')
"""

RANDOM_NUMBERS = """
    import torch

    torch.cuda.manual_seed(3)
    a = torch.rand(4, device='cuda')
    torch.cuda.manual_seed_all(3)
    assert torch.equal(a, torch.rand(4, device='cuda'))
    state = torch.cuda.get_rng_state()
    b = torch.rand(4, device='cuda')
    torch.cuda.set_rng_state(state)
    assert torch.equal(b, torch.rand(4, device='cuda'))
    states = torch.cuda.get_rng_state_all()
    with torch.random.fork_rng():
        c = torch.rand(4, device='cuda')
    assert torch.equal(c, torch.rand(4, device='cuda'))
    torch.cuda.set_rng_state_all(states)
    assert torch.equal(c, torch.rand(4, device='cuda'))
    g = torch.Generator(device='cuda').manual_seed(5)
    h = torch.Generator('cuda').manual_seed(5)
    d = torch.rand(4, device='cuda', generator=g)
    assert torch.equal(d, torch.rand(4, device='cuda', generator=h))
    assert isinstance(g, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
    assert torch.Generator().device.type == 'cpu'
"""

THE_MODULE = """
    import threading, torch
    from torch.utils.data import DataLoader, TensorDataset

    cuda = torch.cuda
    assert cuda.is_available() and cuda.device_count() == 1 and cuda.current_device() == 0
    cuda.init(); cuda.empty_cache(); cuda.reset_peak_memory_stats(); cuda.synchronize('cuda:0'); cuda.ipc_collect()
    assert isinstance(cuda.get_device_name(0), str) and cuda.get_device_capability() >= (7, 0)
    assert cuda.get_device_properties('cuda').total_memory > 0 and cuda.mem_get_info()[1] > 0
    assert cuda.is_bf16_supported() and cuda.is_initialized()
    x = torch.ones(256, device='cuda') + 1
    cuda.synchronize()
    assert cuda.memory_allocated() >= 1024 and cuda.max_memory_allocated(0) >= 1024
    assert cuda._initialized  # reversible layers ask for this before they keep the states of generators
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(stream=side), cuda.StreamContext(side), cuda.stream(None):
        y = x * 2
        y.record_stream(side)
    cuda.current_stream().wait_stream(side)
    side.synchronize()
    with cuda.device(0), cuda.nvtx.range('part'):
        cuda.nvtx.mark('here')
        z = y.cuda()
    assert z.sum().item() == 1024
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.zeros(1, device='cuda').is_cuda))
    thread.start(); thread.join()
    assert found == [True]
    loader = DataLoader(TensorDataset(torch.arange(6.)), batch_size=3, shuffle=True, pin_memory=True, num_workers=1)
    assert sum(batch.to('cuda', non_blocking=True).sum().item() for batch, in loader) == 15
    from torch.utils.checkpoint import checkpoint
    w = torch.ones(3, device='cuda', requires_grad=True)
    with torch.autocast('cuda', dtype=torch.bfloat16):
        checkpoint(lambda w: torch.nn.functional.dropout(w * 2, 0.5).sum(), w, use_reentrant=False).backward()
    assert w.grad.is_cuda
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type='cuda', cast_inputs=torch.float32)
        def forward(ctx, x):
            assert x.dtype is torch.float32
            return 2 * x
        @staticmethod
        @torch.amp.custom_bwd(device_type='cuda')
        def backward(ctx, g):
            return 2 * g
    with torch.autocast('cuda'):
        assert Double.apply(torch.ones(2, device='cuda', dtype=torch.float16)).tolist() == [2, 2]
    torch.save(torch.ones(2, device='cuda'), 'x.pt')
    assert torch.load('x.pt', map_location=torch.device('cuda:0')).is_cuda
    assert torch.load('x.pt', map_location={'cuda:0': 'cpu'}).device.type == 'cpu'
"""


CHECKPOINTS = """
    import torch
    torch.save({'w': torch.ones(2, device='cuda')}, 'gpu.pt')
    torch.save({'w': torch.ones(2)}, 'cpu.pt')
    for name in ('gpu.pt', 'cpu.pt'):
        for where in ('cuda', 'cuda:0', torch.device('cuda'), lambda s, l: s.cuda(0), lambda s, l: s.cuda()):
            loaded = torch.load(name, map_location=where)['w']
            assert loaded.is_cuda and loaded.sum().item() == 2
        for where in ('cpu', lambda s, l: s, {'cuda:0': 'cpu'}):
            assert torch.load(name, map_location=where)['w'].sum().item() == 2
            assert not torch.load(name, map_location=where)['w'].is_cuda
    try:
        torch.load('cpu.pt', map_location='cuda:1')
    except RuntimeError as error:
        assert 'torch.cuda.device_count() is 1' in str(error)
"""

EXPORT = """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()).cuda()
    x = torch.ones(2, 3).cuda()
    exported = torch.export.export(model, (x,))
    assert torch.equal(exported.module()(x), model(x))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.nn.Parameter(x))
        assert (fake * 2).sum().shape == ()
        assert torch.empty(3, device='cuda').shape == (3,)
"""

LEGACY_TYPES = """
    import torch
    x = torch.cuda.FloatTensor([1, 2])
    assert x.is_cuda and x.dtype is torch.float32 and x.type() == 'torch.cuda.FloatTensor'
    assert isinstance(x, torch.cuda.FloatTensor) and not isinstance(torch.ones(1), torch.cuda.FloatTensor)
    assert torch.cuda.LongTensor(2, 3).shape == (2, 3)
    y = torch.ones(2).type(torch.cuda.LongTensor)
    assert y.is_cuda and y.dtype is torch.int64 and y.type('torch.cuda.HalfTensor').dtype is torch.float16
    assert torch.ones(2).type(torch.float64).type() == 'torch.DoubleTensor'
    torch.set_default_tensor_type('torch.cuda.DoubleTensor')
    assert torch.ones(1).is_cuda and torch.ones(1).dtype is torch.float64
"""

HOOKS = """
    import torch
    seen = []
    def pack(x):
        seen.append(x.device.type)
        return x.device, x.cpu()
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.device = x.device
            return x * 2
        @staticmethod
        def backward(ctx, grad):
            seen.append(grad.device.type)
            return grad * torch.full((3,), 2.0, device=ctx.device)
    x = torch.ones(3, device='cuda', requires_grad=True)
    x.register_hook(lambda grad: grad + torch.ones(3, device='cuda'))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[1].to(packed[0])):
        y = Double.apply(x).square().sum()
    y.backward()
    assert x.grad.tolist() == [9, 9, 9] and set(seen) == {'cuda'}, (x.grad, seen)
    assert torch.autograd.grad(Double.apply(x).sum(), x)[0].tolist() == [3, 3, 3]
"""

DEVICES_SHOWN = """
    import torch
    generator = torch.Generator('cuda').manual_seed(1)
    assert generator.device == torch.device('cuda', 0) and isinstance(generator, torch.Generator)
    assert torch.randn(2, device='cuda', generator=generator).is_cuda
    assert torch.Generator().device == torch.device('cpu') and torch.device(0) == torch.device('cuda', 0)
    x = torch.ones(2, device='cuda')
    assert x.untyped_storage().device == x.device and torch.ones(2).untyped_storage().device.type == 'cpu'
    assert torch.range(0, 2, device='cuda').is_cuda
    assert torch.nested.nested_tensor([x, x], layout=torch.jagged, device='cuda').is_cuda
    torch.save(x, 'x.pt')
    seen = []
    torch.load('x.pt', map_location=lambda storage, place: seen.append(place) or storage)
    assert seen == ['cuda:0'] and torch.load('x.pt').is_cuda
"""

ACCELERATOR = """
    import torch
    accelerator = torch.accelerator
    assert accelerator.is_available() and accelerator.current_accelerator() == torch.device("cuda")
    assert accelerator.device_count() == torch.cuda.device_count() == 1
    for device in (0, "cuda", "cuda:0", torch.device("cuda", 0)):
        accelerator.set_device_index(device)
        accelerator.synchronize(device)
    assert accelerator.current_device_index() == 0
    for device in (1, "cuda:1", torch.device("cuda", 1)):
        try:
            accelerator.set_device_index(device)
        except torch.AcceleratorError as error:
            assert "invalid device ordinal" in str(error)
        else:
            raise AssertionError(device)
    assert torch.ones(3, device=accelerator.current_accelerator()).is_cuda
    with accelerator.device_index(0), torch.random.fork_rng():
        torch.rand(2, device="cuda")
    accelerator.synchronize()
"""

GPU_SCRIPTS = {
    "nano_gpt_style": NANO_GPT_STYLE,
    "cuda_everywhere": CUDA_EVERYWHERE,
    "random_numbers": RANDOM_NUMBERS,
    "the_module": THE_MODULE,
    "legacy_types": LEGACY_TYPES,
    "checkpoints": CHECKPOINTS,
    "export": EXPORT,
    "hooks": HOOKS,
    "devices_shown": DEVICES_SHOWN,
    "accelerator": ACCELERATOR,
}


@pytest.mark.parametrize(
    "script",
    list(GPU_SCRIPTS.values()),
    ids=list(GPU_SCRIPTS),
)
def test_a_script_for_gpus_runs(tmp_path: Path, script: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script), encoding="utf-8")
    command = [sys.executable, "-m", "marid", "run", "--as-cuda", "--no-summary", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


SCRIPTS = sorted(path for path in (Path(__file__).parent / "gpu_scripts").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_usual_script_prints_what_it_prints_on_the_cpu(tmp_path: Path, path: Path) -> None:
    """Losses, accuracies and samples of scripts that take a GPU where there is one."""
    printed = []
    for command in ([sys.executable], [sys.executable, "-m", "marid", "run", "--as-cuda", "--no-summary"]):
        done = subprocess.run(
            [*command, str(path)], capture_output=True, text=True, cwd=tmp_path, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1]
