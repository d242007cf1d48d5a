"""A scenario: a configuration, the faults that befall it, and whether it ends as its undisturbed twin."""

from __future__ import annotations

import json
import platform
import random
import shutil
import subprocess
import threading
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.soak.configurations import Configuration
from tests.soak.damages import DAMAGES
from tests.soak.faults import BLOWS, TROUBLES, Damage, Fault, kill
from tests.soak.ground import NAME, Ended, Ground
from tests.soak.referee import PromiseError, check_ledger, check_same, check_whole, everything, progress, require

DISK_FULL = "disk full"
REFUSED = 2
AGAIN = 0.25  # of the runs that have ended are resumed once more
EARLY = 0.15  # of the kills come while the process starts
Kind = TypeVar("Kind", Fault, Damage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Befallen:
    """A fault and what came of it: `went on`, `resumed`, `refused`, or `missed` where the run was faster."""

    fault: str
    outcome: str
    code: int | None = None
    message: str = ""


@dataclass(slots=True, kw_only=True)
class Account:
    """What happened in a scenario; `failure` is empty if every promise was kept."""

    number: int
    configuration: str
    faults: list[Befallen] = field(default_factory=list)
    processes: int = 0
    seconds: float = 0.0
    failure: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Twins:
    """Runs that are left alone, each made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()

    def of(self, configuration: Configuration) -> Path:
        folder = self._folder / configuration.name
        with self._lock:
            if not (folder / "made").exists():
                shutil.rmtree(folder, ignore_errors=True)
                self._make(configuration, folder)
                (folder / "made").touch()
        return folder / NAME

    def _make(self, configuration: Configuration, folder: Path) -> None:
        ground = Ground(configuration, folder, random.Random(0))
        try:
            ground.set_up()
            ended = ground.finish(ground.start())
            require(ended.code == 0, f"left alone, {configuration.name} ends with {ended.code}: {ended.err[-2000:]}")
        finally:
            ground.close()


class Scenario:
    """One of them, drawn from a seed and its number."""

    def __init__(self, seed: int, number: int, pool: Sequence[Configuration], folder: Path, *, mounts: bool) -> None:
        self.stream = random.Random(f"{seed} scenario {number}")
        rounds, place = divmod(number, len(pool))
        order = random.Random(f"{seed} round {rounds}").sample(pool, len(pool))  # every shape, in each round
        self.configuration, self._pool = order[place], pool
        self.account = Account(number=number, configuration=self.configuration.name)
        self._ground = Ground(self.configuration, folder, self.stream)
        self.blows = self._some(BLOWS, self.stream.randint(1, 4))
        if not mounts:
            self.blows = [blow for blow in self.blows if blow.name != DISK_FULL]
        self._is_on_disk_of_its_own = any(blow.name == DISK_FULL for blow in self.blows)
        self._lost: list[str] = []  # places of files that faults have deleted for good
        self._is_moot = False
        self._reached = 0  # the step with which the run would go on

    def _some(self, kinds: Sequence[Kind], count: int) -> list[Kind]:
        """Drawn without replacement, each with a weight of one over the share of configurations that it suits."""
        fitting = [kind for kind in kinds if kind.suits(self.configuration)]
        shares = {kind.name: sum(map(kind.suits, self._pool)) / len(self._pool) for kind in fitting}
        return sorted(fitting, key=lambda kind: self.stream.random() ** shares[kind.name], reverse=True)[:count]

    def play(self, twins: Twins) -> Account:
        """The run with its faults, to the end; then it must be its twin."""
        started, folder = time.monotonic(), self._ground.folder
        try:
            twin = twins.of(self.configuration)
            self._prepare(folder)
            self._ground.set_up()
            if not self._is_over():
                require(self._leg([], None), "a process that nothing ended did not complete the run")
            check_ledger(folder)
            if not self._is_moot:
                check_same(self._ground.run, twin, is_campaign=self.configuration.is_campaign, lost=self._lost)
                if self.stream.random() < AGAIN:
                    self._again()
        except PromiseError as error:
            self.account.failure = str(error)
        except Exception:  # whatever it is, the other scenarios go on, and this one counts as failed
            self.account.failure = traceback.format_exc()
        finally:
            self._ground.close()
            self._leave(folder)
        self.account.seconds = round(time.monotonic() - started, 1)
        return self.account

    def _again(self) -> None:
        """What is complete stays as it is."""
        before = everything(self._ground.run)
        ended = self._ground.finish(self._ground.start())
        require(ended.code == 0 and "lready complete" in ended.out, f"complete, and resumed: {ended.out}{ended.err}")
        changed = [name for name, content in everything(self._ground.run).items() if before.get(name) != content]
        require(not changed, f"complete, and resumed: {changed} changed")
        self._note("resumed when complete", "went on", ended)

    def _prepare(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if self._is_on_disk_of_its_own:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m", "none", folder], check=True)

    def _leave(self, folder: Path) -> None:
        if self._is_on_disk_of_its_own and folder.is_mount():
            if self.account.failure:
                shutil.copytree(folder, folder.with_name(f"{folder.name}-kept"), dirs_exist_ok=True)
            subprocess.run(["umount", "--lazy", folder], check=True)
        if not self.account.failure:
            shutil.rmtree(folder, ignore_errors=True)

    def _is_over(self) -> bool:
        """The legs that blows end, and what happens between them; True if the run completed on the way."""
        for left, blow in reversed(list(enumerate(self.blows))):
            if self._leg(self._some(TROUBLES, self.stream.choice((0, 1, 1, 2))), blow, of=left + 1):
                return True
            if any((run / "run.json").exists() for run in self._ground.runs) and self._ground.victim.exists():
                for damage in self._some(DAMAGES, self.stream.choice((0, 1, 1, 2))):
                    self._damage(damage)
        return False

    def _leg(self, troubles: Sequence[Fault], blow: Fault | None, of: int = 1) -> bool:
        """One process from its start to its end; True if it completed the run."""
        ground = self._ground
        faults = [*troubles, *([blow] if blow else [])]
        have, process = ground.num_records(), ground.start("\n".join(fault.patch(ground) for fault in faults))
        self.account.processes += 1
        most = (self.configuration.num_records * max(1, len(ground.runs)) - have) // (of + 1)
        for fault in faults:
            process = fault.strike(ground, process) if fault.is_at_once else process
        if blow and blow.strike is kill and self.stream.random() < EARLY:
            ground.pause(4.0)  # perhaps before there is a run
        else:
            ground.wait_for_records(process, have + self.stream.randint(0, max(0, most)))
        for fault in (fault for fault in faults if not fault.is_at_once):
            if process.poll() is None:
                ground.pause(0.5)
                process = fault.strike(ground, process)
        ended = ground.finish(process)
        for trouble in troubles:
            self._note(trouble.name, "went on")
        return self._judge(blow, ended)

    def _judge(self, blow: Fault | None, ended: Ended) -> bool:
        told = f"code {ended.code}: {(ended.err or ended.out)[-1500:]}"
        is_killed = blow is not None and ended.code in blow.codes and ended.code < 0
        if blow is not None:
            blow.mend(self._ground)
        if ended.code == 0:
            if blow is not None:
                self._note(blow.name, "missed", ended)
                self._is_moot = bool(blow.loses)  # it may have deleted what the run had finished with
            return True
        require(blow is not None and ended.code in blow.codes, f"after {blow.name if blow else 'nothing'}: {told}")
        assert blow is not None
        require("Traceback" not in ended.err, f"after {blow.name}: {told}")
        require(is_killed or blow.says in ended.err, f"after {blow.name}, which says {blow.says!r}: {told}")
        self._note(blow.name, "resumed", ended)
        self._lost += blow.loses
        self._check_nothing_is_lost(blow.name)
        return False

    def _check_nothing_is_lost(self, after: str) -> None:
        check_whole(self._ground.runs)
        if not self.configuration.is_campaign:
            reached = progress(self._ground.run)
            require(reached >= self._reached, f"after {after}: a checkpoint of step {self._reached} is gone")
            self._reached = reached

    def _damage(self, damage: Damage) -> None:
        refusal = damage.strike(self._ground)
        if refusal:
            self._note(damage.name, "refused", Ended(code=REFUSED, out="", err=refusal))
        else:
            self._note(damage.name, "went on")
        self._reached = 0 if damage.name.startswith("checkpoint") else self._reached

    def _note(self, fault: str, outcome: str, ended: Ended | None = None) -> None:
        lines = [line.strip() for line in ended.err.splitlines() if line.strip()] if ended and ended.code else []
        code = ended.code if ended else None
        self.account.faults.append(Befallen(fault=fault, outcome=outcome, code=code, message=" / ".join(lines)[:600]))


OUTCOMES = ("went on", "resumed", "refused", "missed")


@dataclass(slots=True, kw_only=True)
class Report:
    """Of all scenarios so far."""

    seed: int
    can_mount: bool
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    accounts: list[Account] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock, repr=False)

    def add(self, account: Account, folder: Path) -> None:
        """One more; several threads may. What there is so far is in the folder, however the soak ends."""
        with self.lock:
            self.accounts.append(account)
            self.seconds = round(time.monotonic() - self.started, 1)
            self._write(folder)

    @property
    def failures(self) -> list[Account]:
        return [account for account in self.accounts if account.failure]

    def _write(self, folder: Path) -> None:
        content = {
            "seed": self.seed,
            "can_mount": self.can_mount,
            "seconds": self.seconds,
            "machine": f"{platform.machine()}, Python {platform.python_version()}",
            "scenarios": [account.as_json() for account in self.accounts],
        }
        (folder / "soak.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (folder / "soak.md").write_text(self.markdown(), encoding="utf-8")

    @classmethod
    def of(cls, content: dict[str, Any]) -> Report:
        accounts = [
            Account(**{**account, "faults": [Befallen(**each) for each in account["faults"]]})
            for account in content["scenarios"]
        ]
        seed, can_mount = content["seed"], content["can_mount"]
        return cls(seed=seed, can_mount=can_mount, seconds=content["seconds"], accounts=accounts)

    def markdown(self) -> str:
        counts = Counter((each.fault, each.outcome) for account in self.accounts for each in account.faults)
        faults = sorted({fault for fault, _ in counts})
        processes = sum(account.processes for account in self.accounts)
        befallen = sum(count for (_, outcome), count in counts.items() if outcome != "missed")
        said = {each.fault: each.message for account in self.accounts for each in account.faults if each.message}
        lines = [
            f"{len(self.accounts)} scenarios, {processes} processes and {befallen} faults in "
            f"{self.seconds / 60:.0f} minutes (seed {self.seed}): {len(self.failures)} ended otherwise than promised.",
            "",
            f"| fault | {' | '.join(OUTCOMES)} |",
            f"|---|{'---:|' * len(OUTCOMES)}",
        ]
        for fault in faults:
            lines.append(f"| {fault} | {' | '.join(str(counts[fault, outcome] or '') for outcome in OUTCOMES)} |")
        lines += [
            "",
            "What was said, once of each:",
            "",
            *(f"- {fault}: `{_short(said[fault])}`" for fault in sorted(said)),
        ]
        return "\n".join(lines) + "\n"


def _short(message: str) -> str:
    parts = [part for part in message.split(" / ") if not part.startswith("retrain:")]
    return (parts or [message])[0][:160].replace("`", "'")
