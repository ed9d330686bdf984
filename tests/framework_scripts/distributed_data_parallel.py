"""``DistributedDataParallel`` with gloo, and the collectives by themselves: prints what rank 0 sees."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DEVICE = sys.argv[1]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{os.environ['MEETING']}", rank=RANK, world_size=WORLD)


def show(*things: object) -> None:
    if RANK == 0:
        print(*things)


def train(unused: bool = False, zero: bool = True, **options: bool) -> None:
    torch.manual_seed(RANK)  # rank 0 gives the others its parameters
    model = nn.ModuleList([nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1), nn.Linear(3, 3)])
    model.forward = lambda x: model[2](torch.relu(model[1](model[0](x))))
    if not unused:
        model = model[:3]
        model.forward = lambda x: model[2](torch.relu(model[1](model[0](x))))
    model.to(DEVICE)
    parallel = DistributedDataParallel(model, find_unused_parameters=unused, **options)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(10 + RANK)
    for step in range(4):
        x, y = torch.randn(8, 4).to(DEVICE), torch.randn(8, 1).to(DEVICE)
        optimizer.zero_grad(set_to_none=zero)
        if step == 2:
            with parallel.no_sync():
                F.mse_loss(parallel(x), y).backward()
        loss = F.mse_loss(parallel(x), y)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(grad.device.type == DEVICE for grad in grads), grads
        nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        optimizer.step()
        show(loss.item(), [p.double().sum().item() for p in model.parameters()], len(grads))


for options in ({}, {"gradient_as_bucket_view": True}, {"unused": True}, {"static_graph": True}, {"zero": False}):
    train(**options)
train(zero=False, gradient_as_bucket_view=True)


def made(*shape: int) -> torch.Tensor:
    return (torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 10 * RANK).to(DEVICE)


x = made(2, 3)
dist.all_reduce(x)
show(x.tolist())
dist.all_reduce(x.t()[1], op=dist.ReduceOp.MAX)
show(x.tolist())
work = dist.broadcast(y := made(3), 0, async_op=True)
work.wait()
show(y.tolist())
dist.all_gather(parts := [torch.zeros(3, device=DEVICE) for _ in range(WORLD)], made(3))
show([part.tolist() for part in parts])
dist.all_gather_into_tensor(whole := torch.zeros(3 * WORLD, device=DEVICE), made(3))
show(whole.tolist())
dist.reduce(z := made(2), 0)
show(z.tolist())
dist.gather(made(2), gathered := [torch.zeros(2, device=DEVICE) for _ in range(WORLD)] if RANK == 0 else None)
show([part.tolist() for part in gathered or []])
dist.scatter(own := torch.zeros(2, device=DEVICE), [made(2) + i for i in range(WORLD)] if RANK == 0 else None)
show(own.tolist())
dist.reduce_scatter_tensor(part := torch.zeros(2, device=DEVICE), made(2 * WORLD))
show(part.tolist())
dist.all_to_all_single(swapped := torch.zeros(2 * WORLD, device=DEVICE), made(2 * WORLD))
show(swapped.tolist())
if WORLD == 2:
    if RANK == 1:
        dist.send(made(2), 0)
    else:
        dist.recv(got := torch.zeros(2, device=DEVICE), 1)
        show(got.tolist())
dist.all_gather_object(objects := [None] * WORLD, {"rank": RANK})
show(objects)
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
# Gloo's threads may free tensors while the interpreter is finalised, and PyTorch then aborts, on the CPU as well
# (https://github.com/pytorch/pytorch/pull/179291).
os._exit(0)
