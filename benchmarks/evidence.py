"""Whether verdicts can be believed: simulations of every claim that docs/pages/evidence.md makes about them.

`python benchmarks/evidence.py` runs all claims of `benchmarks/claims/`, `--only NAME ...` some of them, and prints
claim | figure | two standard errors | target | ok. A figure that misses its target by more than two standard errors
makes the exit code 1. All of it uses the functions that `retrain compare` uses.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import time
from collections.abc import Mapping, Sequence

import claims
import numpy as np
import scipy
from claims.claim import Claim, Measured

from retrain.kernel.seeding import Seeds

LEAST_SIMULATIONS = 2_000
HEADS = ("claim", "figure", "2 se", "target", "ok")


def all_claims() -> Mapping[str, Claim]:
    """The claims of every module of `claims`, by name."""
    found: dict[str, Claim] = {}
    for module in sorted(pkgutil.iter_modules(claims.__path__), key=lambda each: each.name):
        more: Mapping[str, Claim] = getattr(importlib.import_module(f"claims.{module.name}"), "CLAIMS", {})
        if twice := found.keys() & more.keys():
            raise ValueError(f"claims/{module.name}.py: also in another file: {', '.join(sorted(twice))}")
        found |= more
    return found


def row(each: Measured) -> tuple[str, ...]:
    """A line of the table."""
    is_bound = each.at_least is not None or each.at_most is not None
    told = ("yes" if each.is_met else "NO") if is_bound else ""
    return each.what, each.shown(each.figure), each.shown(each.error), each.target, told


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print, and return 1 on a miss."""
    known = all_claims()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=LEAST_SIMULATIONS, help="of each figure (default 2000)")
    parser.add_argument("--seed", type=int, default=20, help="of all random numbers (default 20)")
    parser.add_argument("--only", nargs="+", choices=sorted(known), metavar="NAME", help=", ".join(sorted(known)))
    options = parser.parse_args(arguments)
    if options.simulations < 2:
        parser.error("--simulations: at least 2")
    versions = f"Python {sys.version.split()[0]}, numpy {np.__version__}, scipy {scipy.__version__}"
    print(
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, {versions}; seed {options.seed}, {options.simulations:,} each\n"
    )
    print(f"| {' | '.join(HEADS)} |\n|---|---:|---:|---|---|", flush=True)
    missed = 0
    for name in options.only or known:
        for each in known[name](options.simulations, Seeds(options.seed)):
            missed += not each.is_met
            print(f"| {' | '.join(row(each))} |", flush=True)
    print(
        f"\n{missed} missed their target" if missed else "\nEvery figure is within two standard errors of its target."
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
