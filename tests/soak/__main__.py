"""`python -m tests.soak --hours H`: random faults on runs and campaigns, which must end as if nothing had been."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.soak.configurations import pool_of
from tests.soak.faults import can_mount
from tests.soak.scenario import Account, Report, Scenario, Twins


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 1 if a promise was broken."""
    options = _options().parse_args(arguments)
    if options.markdown:
        print(Report.of(json.loads(options.markdown.read_text(encoding="utf-8"))).markdown())
        return 0
    seed = random.SystemRandom().randrange(10**6) if options.seed < 0 else options.seed
    folder = options.folder or Path(tempfile.mkdtemp(prefix="retrain-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(seed=seed, can_mount=can_mount(folder / "mounted"))
    print(f"seed {seed}, folder {folder}", flush=True)
    _soak(report, folder, options)
    print(report.markdown())
    print(f"Report: {folder / 'soak.json'}")
    return 1 if report.failures else 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=-1, help="of configurations and faults; drawn, if left out")
    parser.add_argument("--only", type=int, help="this scenario alone")
    parser.add_argument("--workers", type=int, default=1, help="scenarios at a time")
    parser.add_argument("--folder", type=Path, help="for runs and report; temporary, if left out")
    parser.add_argument("--markdown", type=Path, metavar="SOAK.JSON", help="only print the table of a report")
    return parser


def _soak(report: Report, folder: Path, options: argparse.Namespace) -> None:
    pool, twins = pool_of(report.seed), Twins(folder / "twins")
    until = time.monotonic() + 3600 * options.hours

    def play(number: int) -> None:
        if number > 0 and options.only is None and time.monotonic() > until:
            return
        place = folder / "scenarios" / f"{number:04d}"
        account = Scenario(report.seed, number, pool, place, mounts=report.can_mount).play(twins)
        report.add(account, folder)
        _tell(account, report.seed, place)

    with ThreadPoolExecutor(options.workers) as workers:
        if options.only is not None:
            workers.submit(play, options.only).result()
            return
        number = 0
        while time.monotonic() < until:
            done = [workers.submit(play, number + n) for n in range(options.workers)]
            number += len(done)
            for each in done:
                each.result()
    shutil.rmtree(folder / "mounted", ignore_errors=True)


def _tell(account: Account, seed: int, place: Path) -> None:
    faults = ", ".join(f"{each.fault} ({each.outcome})" for each in account.faults)
    state = "FAILED" if account.failure else "ok"
    print(f"{account.number:4d} {state} {account.seconds:5.1f} s  {account.configuration}: {faults}", flush=True)
    if account.failure:
        again = f"nox -s soak -- --seed {seed} --only {account.number}"
        print(f"     {account.failure}\n     kept in {place}\n     again: {again}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
