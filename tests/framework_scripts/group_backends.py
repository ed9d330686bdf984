"""Groups as scripts make them, by several ways of naming a backend or none; layers that are drawn after sharding."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

DEVICE = sys.argv[1]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.zeros(1, device=DEVICE)
WAYS = {
    "gloo": {"backend": "gloo"},
    "none": {},
    "device": {"backend": "gloo", "device_id": torch.device(DEVICE, 0)} if DEVICE != "cpu" else {"backend": "gloo"},
    "own": {"backend": f"{DEVICE}:gloo"},
    "default": {"backend": dist.get_default_backend_for_device(DEVICE)},
}
for name, way in WAYS.items():
    dist.init_process_group(init_method=f"file://{os.environ['MEETING']}-{name}", rank=RANK, world_size=WORLD, **way)
    x = torch.arange(3.0, device=DEVICE) + RANK
    dist.all_reduce(x)
    torch.manual_seed(0)
    with torch.device("meta"):
        layer = nn.Linear(5, 4)
    fully_shard(layer, mesh=init_device_mesh(DEVICE, (WORLD,)))
    layer.to_empty(device=DEVICE)
    layer.reset_parameters()
    whole = layer.weight.full_tensor()
    if RANK == 0:
        print(name, x.tolist(), whole.tolist())
    dist.destroy_process_group()
