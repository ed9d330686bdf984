"""Processes that the script spawns itself, a group of NCCL where there is a GPU, DDP and fully sharded parameters."""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["nccl", "cpu:gloo,cuda:nccl", None] if DEVICE == "cuda" else ["gloo", "gloo", "gloo"]


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(DEVICE)


def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    order = torch.Generator().manual_seed(1)
    for _ in range(5):
        loss = model(torch.randn(6, 8, generator=order).to(DEVICE)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def worker(rank, world, meeting):
    for number, backend in enumerate(BACKENDS):
        bound = {"device_id": torch.device("cuda", rank)} if DEVICE == "cuda" else {}
        place = f"file://{meeting}/{number}"
        dist.init_process_group(backend, init_method=place, rank=rank, world_size=world, **bound)
        print(train(DistributedDataParallel(network(), device_ids=[rank] if DEVICE == "cuda" else None)))
        mesh = init_device_mesh(DEVICE, (world,))
        model = network()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        print(train(model))
        if DEVICE == "cuda":
            model = network()
            fully_shard(model)
            train(model)
            dist.barrier(device_ids=[rank])
        total = torch.ones(3, device=DEVICE)
        dist.all_reduce(total)
        print(total.tolist())
        objects = [None]
        dist.all_gather_object(objects, {"rank": rank})
        print(objects)
        group = dist.new_group([0], backend=BACKENDS[0])
        dist.all_reduce(total, group=group)
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as meeting:
        mp.spawn(worker, args=(1, meeting), nprocs=1)
    with mp.get_context("forkserver").Pool(1) as pool:
        print(pool.apply(os.path.basename, (__file__,)))
