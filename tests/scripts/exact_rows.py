"""The exact posterior of rows that several processes hold, each a part of its own.

python exact_rows.py OUT: writes OUT-<rank> as safetensors; run by tests, alone or by a launcher.
"""

import os
import sys
from datetime import timedelta

import safetensors.torch
import torch
import torch.distributed
from torch import nn

from pyro_dak import DAK, GaussianLikelihood, exact_posterior


def main() -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = DAK(nn.Linear(3, 4), 4, num_units=3, num_outputs=2, likelihood=GaussianLikelihood(0.3))
    x = torch.randn(50, 3)
    y = torch.stack([x.sin().sum(-1), x.square().sum(-1)], -1)
    first, more = ([slice(0, 9), slice(9, 40)][rank], slice(40 + 3 * rank, 43 + 7 * rank))
    if size == 1:
        first, more = slice(0, 40), slice(40, 50)
    options = {"over_processes": size > 1, "residual_variance": True, "chunk_size": 7}
    exact = exact_posterior(model, x[first], y[first], **options)
    later = exact.update(model, x[more], y[more], **options)
    tensors = {"loc": exact.guide.loc, "tril": exact.guide.scale_tril, "later": later.guide.loc}
    evidence = torch.tensor([exact.log_evidence, later.log_evidence])
    tensors = {name: t.detach().contiguous() for name, t in tensors.items()}
    safetensors.torch.save_file(tensors | {"evidence": evidence}, f"{sys.argv[1]}-{rank}")


if __name__ == "__main__":
    main()
    if "RANK" in os.environ:  # torch 2.14 with gloo sometimes aborts while it shuts down
        os._exit(0)
