"""Overwrite a saved model again and again: run by tests beside readers and other writers.

python save_again.py PATH COUNT [--without-exchange]

Every weight of z is the number of the save, so that a reader can tell a mixture.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from pyro_dak import DAK, MeanFieldGuide, save
from pyro_dak.training import files


def make_model(value: float) -> tuple[DAK, MeanFieldGuide]:
    model = DAK(nn.Linear(1, 1), 1, num_units=1, level=1)
    guide = MeanFieldGuide(model)
    nn.init.constant_(model.feature_extractor.weight, value)
    nn.init.constant_(guide.z_loc, value)
    return model, guide


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("count", type=int)
    parser.add_argument("--without-exchange", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.without_exchange:
        files._exchange = lambda first, second: False
    save(*make_model(0), args.path, overwrite=True)
    print("started", flush=True)
    for number in range(1, args.count + 1):
        save(*make_model(number), args.path, overwrite=True)


if __name__ == "__main__":
    main()
