"""FSDP2 (``fully_shard``) with gloo, tensors that are distributed, functional collectives: prints what rank 0 sees."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

DEVICE = sys.argv[1]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if DEVICE != "cpu":
    torch.accelerator.set_device_index(0)
dist.init_process_group("gloo", init_method=f"file://{os.environ['MEETING']}", rank=RANK, world_size=WORLD)
MESH = init_device_mesh(DEVICE, (WORLD,))


def show(*things: object) -> None:
    if RANK == 0:
        print(*things)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def train(accumulate: bool = False, **options: object) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(16), Block(15), nn.Linear(8, 3)).to(DEVICE)
    for block in model[:2]:
        fully_shard(block, mesh=MESH, **options)
    fully_shard(model, mesh=MESH, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    torch.manual_seed(10 + RANK)
    for step in range(4):
        if accumulate:
            model.set_requires_gradient_sync(step % 2 == 1)
        x, y = torch.randn(6, 8).to(DEVICE), torch.randn(6, 3).to(DEVICE)
        loss = (model(x).float() - y).square().mean()
        loss.backward()
        if not accumulate or step % 2 == 1:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            show(norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item())
            optimizer.step()
            optimizer.zero_grad()
        show(loss.item(), all(p.to_local().device.type == DEVICE for p in model.parameters()))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    show({name: (tuple(one.shape), one.double().sum().item()) for name, one in whole.items()})
    with torch.no_grad():
        show(model(torch.ones(2, 8, device=DEVICE)).tolist())


train()
train(reshard_after_forward=False)
train(accumulate=True)
train(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))

torch.manual_seed(0)
block = Block(16).to(DEVICE)
x = torch.randn(4, 8).to(DEVICE)
alone = block(x)
parallel = parallelize_module(block, MESH, {"up": ColwiseParallel(), "down": RowwiseParallel()})
together = parallel(x)
together.square().sum().backward()
show(together.tolist(), torch.allclose(alone, together, atol=1e-5), block.up.weight.grad.full_tensor().sum().item())

table = torch.arange(10.0).reshape(5, 2).to(DEVICE)
rows = distribute_tensor(table, MESH, [Shard(0)])
show(rows.to_local().tolist(), (rows @ rows.t()).full_tensor().tolist())
show(rows.sum().full_tensor().item(), rows.redistribute(MESH, [Replicate()]).to_local().tolist())
show(rows.redistribute(MESH, [Shard(1)]).to_local().tolist())

own = torch.arange(4.0).to(DEVICE) + RANK
group = dist.group.WORLD
show(functional.all_reduce(own, "sum", group).tolist(), functional.broadcast(own, 0, group).tolist(), own.tolist())
show(functional.all_reduce_inplace(own.clone(), "max", group).tolist())
show(functional.reduce_scatter_tensor(torch.arange(2.0 * WORLD).to(DEVICE), "sum", 0, group).tolist())
show(functional.all_to_all_single(torch.arange(2.0 * WORLD).to(DEVICE), None, None, group).tolist())
show([one.tolist() for one in functional.all_reduce_coalesced([own, own * 2], "sum", group)])

dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo's threads: see distributed_data_parallel.py
