"""The tuning runs of a campaign, before its final ones: a campaign as well, in its folder `tuning`.

It is run in rounds. A round has the configurations that the searches ask for, on every tuning seed, up to their next
decision; the searches are told when all of it has ended. So the result depends on no timing, and a campaign that was
killed comes to the same choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.campaign.launching import Launcher
from retrain.campaign.load import Campaign, CheckedCondition
from retrain.campaign.manifest import CampaignRecord, Manifest, new_content
from retrain.campaign.planned import PlannedRun, devices_of, run_names
from retrain.campaign.report_lines import Lines
from retrain.campaign.schedule import FollowUps, Schedule, Stops
from retrain.campaign.search import Search, Trial, open_journal
from retrain.campaign.tune_checks import tuned_ranges, tuning_metric
from retrain.kernel.errors import ConfigError, Problem, RetrainError
from retrain.kernel.registry import Plugins
from retrain.records.reading import read_if_any, tables_in
from retrain.records.record_names import CAMPAIGN_FILE, TUNING
from retrain.records.run import Run
from retrain.records.runs.curves import TOKENS, Align, Direction, Metric, along, value_at
from retrain.records.tune_table import TuneTable
from retrain.run.backend import RunDevices
from retrain.text.amounts import counted
from retrain.text.terminal_text import OUTCOME_LEVEL

JOURNAL = "optuna.jsonl"
Values = Mapping[str, Any]
Cell = tuple[str, int]  # a condition and a final seed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """A choice to make: of one condition, for one final seed or for all (None)."""

    condition: CheckedCondition
    seed: int | None
    search: Search


@dataclass(slots=True, kw_only=True)
class Tuning:
    """The search of one session."""

    campaign: Campaign
    plugins: Plugins
    folder: Path
    devices: Mapping[str, RunDevices]
    launcher: Launcher
    stops: Stops
    lines: Lines

    def run(self, runs: Sequence[PlannedRun], manifest: Manifest) -> list[PlannedRun]:
        """Run what is missing, record it in `manifest` and the ledger, and return the final runs with their values.

        After a stop they are returned unchanged: none of them may be started.
        """
        (self.folder / TUNING).mkdir(exist_ok=True)
        choices = list(self._choices())
        while (pending := self._pending(choices)) and not self.stops.reason:
            self._round(pending)
        if self.stops.reason:
            return list(runs)
        if lost := [each for each in choices if each.search.best is None]:
            which = ", ".join(f"{each.condition.label}{f', seed {each.seed}' if each.seed else ''}" for each in lost)
            what = f"every configuration of {which} failed"
            fix = f"see stderr.log under {self.folder / TUNING / 'runs'}, and change the ranges: a new campaign starts"
            raise RetrainError(Problem(code="tune.all-failed", where=str(self.folder / TUNING), what=what, fix=fix))
        record = self._record(choices)
        if record != manifest.content.get("tuning"):
            manifest.change(tuning=record)
            manifest.save()
            CampaignRecord(self.folder, self.lines).tuned(record)
            spent = sum(each["runs"] for each in record["conditions"].values())
            self.lines.say(f"Tuned: {counted(len(choices), 'choice')} after {spent} runs", OUTCOME_LEVEL)
        return [replace(run, values=self._chosen(run, choices)) for run in runs]

    @property
    def _tune(self) -> TuneTable:
        assert self.campaign.table.tune is not None, "no [campaign.tune]"
        return self.campaign.table.tune

    @property
    def _direction(self) -> Direction:
        return Direction(self.campaign.table.plan.direction if self.campaign.table.plan else Direction.HIGHER)

    def _choices(self) -> Iterator[_Choice]:
        journal, seeds, tune = open_journal(self.folder / TUNING / JOURNAL), self.campaign.table.seeds, self._tune
        for condition in self.campaign.conditions:
            ranges = tuned_ranges(condition.condition, self.campaign.ranges)
            for index in range(tune.num_choices(len(seeds)) if ranges else 0):
                seed = seeds[index] if tune.num_choices(len(seeds)) > 1 else None
                search = Search(
                    journal,
                    f"{condition.label} {'all' if seed is None else seed}",
                    tune,
                    ranges,
                    num_choices=tune.num_choices(len(seeds)),
                    is_higher=self._direction is Direction.HIGHER,
                    stream=index,
                )
                yield _Choice(condition=condition, seed=seed, search=search)

    def _pending(self, choices: Sequence[_Choice]) -> list[tuple[_Choice, Trial]]:
        table, tune = self.campaign.table, self._tune
        at_once = 2**31  # of random values, all that the budget has
        if tune.tokens or tune.sampler == "tpe":
            workers = (table.max_workers or len(choices)) if table.parallel else 1
            at_once = math.ceil(workers / (len(choices) * len(tune.seeds)))
        return [(choice, trial) for choice in choices for trial in choice.search.active(at_once)]

    def _round(self, pending: Sequence[tuple[_Choice, Trial]]) -> None:
        runs = {(choice.search, trial.number): self._runs(choice, trial) for choice, trial in pending}
        failures = self._executed([run for each in runs.values() for run in each])
        if self.stops.reason:
            return
        reported = []
        for choice, trial in pending:
            own = runs[choice.search, trial.number]
            found = [_outcome(run, self._metric, self._direction) for run in own if run.name not in failures]
            values = [value for value, _ in found if value is not None]
            value = sum(values) / len(values) if len(values) == len(own) else None
            tokens = sum(tokens for _, tokens in found)
            choice.search.report(trial, value, steps=own[0].max_steps, tokens=tokens)
            reported.append((choice, trial, own[0]))
        for choice, trial, run in reported:  # once the values of all are known
            choice.search.decide(trial, is_last=run.max_steps == self.campaign.steps_of(choice.condition))

    @property
    def _metric(self) -> Metric:
        return tuning_metric(self.campaign.table)

    def _runs(self, choice: _Choice, trial: Trial) -> list[PlannedRun]:
        """Return the runs of one configuration up to its next decision, on examples that no final run is judged by."""
        condition, evaluation = choice.condition, choice.condition.config.eval
        named = {path.rpartition(".")[2]: value for path, value in trial.values.items()}
        labelled = replace(condition.condition, overrides={**condition.condition.overrides, **named})
        rung = self._tune.rungs(self.campaign.steps_of(condition))[trial.num_rungs]
        apart = {"eval.skip": evaluation.skip + evaluation.examples}
        apart |= {"eval.examples": self._tune.examples or evaluation.examples}
        number = f"{'all' if choice.seed is None else choice.seed}.{trial.number}"
        names = run_names([f"{condition.label}~tune{number}_s{seed}" for seed in self._tune.seeds])
        return [
            PlannedRun(
                number=trial.number + 1,
                name=name,
                condition=replace(condition, condition=labelled),
                seed=seed,
                folder=self.folder / TUNING / "runs" / name,
                config_file=self.folder / TUNING / "configs" / f"{name}.toml",
                max_steps=rung,
                devices=devices_of(condition, self.campaign, self.devices.get(condition.label)),
                values={**trial.values, **(apart if evaluation.examples else {})},
            )
            for name, seed in zip(names, self._tune.seeds, strict=True)
        ]

    def _executed(self, runs: Sequence[PlannedRun]) -> Mapping[str, str]:
        """Run one round, and return the runs that failed after their retries, with the reason."""
        table, path = self.campaign.table, self.folder / TUNING
        before = read_if_any(path / CAMPAIGN_FILE)
        numbered = [replace(run, number=number) for number, run in enumerate(runs, start=1)]
        content = tuning_content(self.campaign, numbered, before)
        manifest = Manifest(path, content)
        manifest.save()
        lines = self.lines.of(len(runs))
        lines.say(f"Tuning: {counted(len(runs), 'run')}, {len(content['runs'])} so far", OUTCOME_LEVEL)
        record = CampaignRecord(path, lines, continues=bool(before))
        record.opened(content, is_new=False, is_beyond_plan=False)
        workers = min(table.max_workers or len(runs), len(runs)) if table.parallel else 1
        with lines.shown():
            schedule = Schedule(
                self.campaign,
                numbered,
                workers=workers,
                throttle_dir=path / "tinker_throttle" if table.parallel else None,
                manifest=manifest,
                launcher=self.launcher,
                lines=lines,
                follow_ups=_NoFollowUps(self.campaign, self.plugins, path, frozenset()),
                stops=self.stops,
                record=record,
            )
            schedule.run()
        return schedule.failures

    def _chosen(self, run: PlannedRun, choices: Sequence[_Choice]) -> Values:
        """Return the values of a final run; a control has those of its condition."""
        number = run.condition.condition.number
        own = [each for each in choices if each.condition.condition.number == number and each.seed in (None, run.seed)]
        return own[0].search.best.values if own and own[0].search.best else {}

    def _record(self, choices: Sequence[_Choice]) -> dict[str, Any]:
        """Everything that was tried, as the manifest keeps it."""
        tune, conditions = self._tune, dict[str, dict[str, Any]]()
        for choice in choices:
            found = conditions.setdefault(choice.condition.label, {"runs": 0, "tokens": 0, "trials": [], "chosen": []})
            trials, best = choice.search.trials, choice.search.best
            found["runs"] += len(trials) * len(tune.seeds)
            found["tokens"] += sum(each.tokens for each in trials)
            found["trials"] += [
                {"for_seed": choice.seed, "number": each.number, "values": dict(each.values), "value": each.value}
                | {"state": each.state, "tokens": each.tokens}
                for each in trials
            ]
            found["chosen"] += [{"for_seed": choice.seed, "values": dict(best.values)}] if best else []
        return {
            "metric": str(self._metric),
            "direction": str(self._direction),
            "unit": "runs" if tune.runs else "tokens",
            "budget": tune.runs or tune.tokens,
            **{name: getattr(tune, name) for name in ("sampler", "pruner", "choice", "seeds")},
            "keys": {each.path: str(each) for each in self.campaign.ranges},
            "conditions": conditions,
        }


class _NoFollowUps(FollowUps):
    """The first final run is followed up, and not a configuration that may lose."""

    def submit(self, run: PlannedRun, *, is_first: bool) -> None: ...


def tuning_content(campaign: Campaign, runs: Sequence[PlannedRun], before: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of the tuning runs: those of this round, and before them the earlier ones."""
    content, now = new_content(campaign, runs), {run.name for run in runs}
    earlier = tables_in(before.get("runs"))
    known = {entry["run_name"]: entry for entry in earlier}
    for entry in content["runs"]:
        entry["attempts"] = known.get(entry["run_name"], entry)["attempts"]
    content["runs"] = [*(entry for entry in earlier if entry["run_name"] not in now), *content["runs"]]
    labels = list(dict.fromkeys(entry["condition"] for entry in content["runs"]))
    assert campaign.table.tune is not None, "no [campaign.tune]"
    return content | {"conditions": labels, "seeds": campaign.table.tune.seeds, "num_runs": len(content["runs"])}


def _outcome(run: PlannedRun, metric: Metric, direction: Direction) -> tuple[float | None, int]:
    """Return the metric of a run, and the tokens that it sampled."""
    try:
        curves = Run(run.folder).curves({metric.field, TOKENS})
    except ConfigError:
        return None, 0
    steps, tokens = along(curves, Align.STEPS), along(curves, Align.TOKENS)
    value = value_at(steps, metric, budget=run.max_steps, direction=direction) if steps else None
    return value, int(tokens.total) if tokens else 0
