"""Train heads in a loop of one's own, in one process or in several, and write their states.

python train_head.py OUT_PREFIX

Process r writes OUT_PREFIX-r.safetensors: the states after training with two guides in all
processes together, and, as "alone", after training in each process by itself.
"""

import os
import sys

import safetensors.torch
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pyro_dak import DAKHead, GaussianLikelihood


class Net(nn.Module):
    def __init__(self, **options: object):
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
        likelihood = GaussianLikelihood(0.5)
        self.head = DAKHead(4, 1, num_data=60, likelihood=likelihood, num_units=3, **options)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head.loss(self.network(x), y)


def train(net: Net, step_fn: nn.Module, x: Tensor, y: Tensor, own: slice) -> dict[str, Tensor]:
    """The state after training on the `own` rows of every batch, and predictions of all rows."""
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for rows in torch.randperm(len(x), generator=generator).split(20):
            optimizer.zero_grad()
            step_fn(x[rows][own], y[rows][own]).backward()
            optimizer.step()
    if rank == 0:  # a prediction in one process waits for no other
        net.head(net.network(x))
    net.head.finish([(x[own], y[own])], net.network, novelty=False)
    prediction = net.head(net.network(x))
    return net.state_dict() | {"mean": prediction.mean, "std": prediction.std}


rank, world_size = (int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1)))
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(60, 3)
y = x.sin().sum(-1, keepdim=True) + 0.1 * torch.randn(60, 1)
if world_size > 1:
    torch.distributed.init_process_group("gloo")
states = {}
for guide in ("mean_field", "natural"):
    net = Net(guide=guide)
    step_fn = DistributedDataParallel(net) if world_size > 1 else net
    states[guide] = train(net, step_fn, x, y, slice(rank, None, world_size))
net = Net(is_synchronized=False)
states["alone"] = train(net, net, (1 + rank) * x, y, slice(None))
safetensors.torch.save_file(
    {f"{kind}.{n}": v.contiguous() for kind, state in states.items() for n, v in state.items()},
    f"{sys.argv[1]}-{rank}.safetensors",
)
if world_size > 1:
    torch.distributed.destroy_process_group()
