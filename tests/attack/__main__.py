"""Run the attacks and print how many attempts failed; the exit code is 1 if any did.

python -m tests.attack [--only kills] [--kills 200] [--seed 0] [--json FILE]
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tests.attack import calls, files, kills, tables, threads, writers

# The attack, how many attempts there are by default, and what must hold.
ATTACKS = {
    "kills": (kills.attack, 200, "a killed run goes on to the weights of one left alone"),
    "files": (files.attack, 500, "a damaged or hostile file is refused in our own words"),
    "tables": (tables.attack, 300, "an odd table gives a right answer or one clear line"),
    "calls": (calls.attack, 5000, "odd arguments give a right answer or an error of our own"),
    "threads": (threads.attack, 64, "eight threads get what one gets"),
    "writers": (writers.attack, 100, "a reader finds the old or the new model"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    for name, (_, count, _) in ATTACKS.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("attack", "what must hold", "tried", "failed", "seconds")
    outcomes = {}
    for name in args.only:
        attack_fn, _, claim = ATTACKS[name]
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            outcome = attack_fn(getattr(args, name), args.seed, Path(folder))
        seconds = f"{time.monotonic() - start:.0f}"
        table.add_row(name, claim, str(outcome.tried), str(len(outcome.failures)), seconds)
        outcomes[name] = outcome._asdict()
    console = Console()
    for name, outcome in outcomes.items():
        for failure in outcome["failures"]:
            console.print(f"{name}: {failure}", markup=False)
    console.print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(outcomes, indent=1))
    return int(any(outcome["failures"] for outcome in outcomes.values()))


if __name__ == "__main__":
    raise SystemExit(main())
