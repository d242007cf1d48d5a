"""The tuning runs of a campaign, before its final ones: a campaign as well, in its folder `tuning`.

It is run in rounds. A round has the configurations that the searches ask for, on every tuning seed, up to their next
decision; the searches are told when all of it has ended. So the result depends on no timing, and a campaign that was
killed comes to the same choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial

from retrain.campaign.load import Campaign
from retrain.campaign.manifest import CampaignRecord, Manifest, new_content
from retrain.campaign.planned import PlannedRun, devices_of, run_names
from retrain.campaign.report_lines import Lines
from retrain.campaign.schedule import Schedule, Stops
from retrain.campaign.search import PASSED, Search, open_journal
from retrain.campaign.search import TOKENS as SPENT
from retrain.campaign.tune_checks import most_held_out, tuned_ranges, tuning_metric
from retrain.kernel.errors import ConfigError, Problem, RetrainError
from retrain.records.files import hash_of
from retrain.records.reading import read_if_any, tables_in
from retrain.records.record_names import CAMPAIGN_FILE, TUNING
from retrain.records.run import Run
from retrain.records.runs.curves import TOKENS, Align, Direction, along, value_at
from retrain.records.tune_table import TuneTable
from retrain.run.backend import RunDevices
from retrain.text.amounts import counted
from retrain.text.terminal_text import OUTCOME_LEVEL

JOURNAL = "optuna.jsonl"
Scheduled = Callable[[Sequence[PlannedRun], Manifest, CampaignRecord, Lines], Schedule]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The search of one session in the campaign's `folder`; `scheduled` makes the schedule of a round."""

    campaign: Campaign
    tune: TuneTable
    folder: Path
    devices: Mapping[str, RunDevices]
    scheduled: Scheduled
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
        if lost := [str(each) for each in choices if each.best is None]:
            what, where = f"every configuration failed of: {'; '.join(lost)}", str(self.folder / TUNING)
            fix = "see stderr.log of its runs, and change the ranges: that starts a new campaign"
            raise RetrainError(Problem(code="tune.all-failed", where=where, what=what, fix=fix))
        record = self._record(choices)
        if record != manifest.content.get("tuning"):
            manifest.change(tuning=record)
            manifest.save()
            CampaignRecord(self.folder, self.lines).tuned(record)
            self.lines.say(f"Tuned: {counted(len(choices), 'choice')}", OUTCOME_LEVEL)
        # A control has the values of its condition.
        chosen = {(each.condition.condition.number, each.seed): each.best for each in choices}
        numbers = [(run, run.condition.condition.number) for run in runs]
        best = [(run, chosen.get((number, run.seed)) or chosen.get((number, None))) for run, number in numbers]
        return [replace(run, values=trial.params if trial else {}) for run, trial in best]

    def _choices(self) -> Iterator[Search]:
        journal = open_journal(self.folder / TUNING / JOURNAL)
        for condition in self.campaign.conditions:
            seeds: Sequence[int | None] = self.campaign.table.seeds if self.tune.is_per_seed else [None]
            for stream, seed in enumerate(seeds if tuned_ranges(condition.condition, self.campaign.ranges) else []):
                yield Search(self.campaign, journal, condition, seed, stream=stream)

    @property
    def _direction(self) -> Direction:
        plan = self.campaign.table.plan
        return Direction(plan.direction) if plan else Direction.HIGHER

    def _pending(self, choices: Sequence[Search]) -> list[tuple[Search, FrozenTrial]]:
        table = self.campaign.table
        at_once = 2**31  # of random values, all that the budget has
        if self.tune.tokens or self.tune.sampler == "tpe":
            workers = (table.max_workers or len(choices)) if table.parallel else 1
            at_once = math.ceil(workers / (len(choices) * len(self.tune.seeds)))
        return [(choice, trial) for choice in choices for trial in choice.active(at_once)]

    def _round(self, pending: Sequence[tuple[Search, FrozenTrial]]) -> None:
        by_trial = [list(self._runs(choice, trial)) for choice, trial in pending]
        failures = self._executed([run for runs in by_trial for run in runs])
        if self.stops.reason:
            return
        for (choice, trial), runs in zip(pending, by_trial, strict=True):
            found = [self._outcome(run) for run in runs if run.name not in failures]
            values = [value for value, _ in found if value is not None]
            mean = sum(values) / len(values) if len(values) == len(runs) else None
            choice.report(trial, mean, steps=runs[0].max_steps, tokens=sum(tokens for _, tokens in found))
        for (choice, trial), runs in zip(pending, by_trial, strict=True):  # once the values of all are known
            choice.decide(trial, is_last=runs[0].max_steps == self.campaign.steps_of(choice.condition))

    def _runs(self, choice: Search, trial: FrozenTrial) -> Iterator[PlannedRun]:
        """Yield the runs of one configuration up to its next decision, on examples that judge no final run."""
        condition, evaluation, path = choice.condition, choice.condition.config.eval, self.folder / TUNING
        shown = {name: float(f"{each:.4g}") if type(each) is float else each for name, each in trial.params.items()}
        named = {name.rpartition(".")[2]: value for name, value in shown.items()}
        labelled = replace(condition.condition, overrides={**condition.condition.overrides, **named})
        apart = {"eval.skip": evaluation.skip + (held_out := most_held_out(condition.config))}
        apart |= {"eval.examples": self.tune.examples or evaluation.examples}
        number = f"{'all' if choice.seed is None else choice.seed}.{trial.number}"
        names = run_names([f"{condition.label}~tune{number}_s{seed}" for seed in self.tune.seeds])
        for name, seed in zip(names, self.tune.seeds, strict=True):
            yield PlannedRun(
                number=0,
                name=name,
                condition=replace(condition, condition=labelled),
                seed=seed,
                folder=path / "runs" / name,
                config_file=path / "configs" / f"{name}.toml",
                max_steps=self.tune.rungs(self.campaign.steps_of(condition))[trial.user_attrs.get(PASSED, 0)],
                devices=devices_of(condition, self.campaign, self.devices.get(condition.label)),
                values={**trial.params, **(apart if held_out else {})},
            )

    def _executed(self, runs: Sequence[PlannedRun]) -> Mapping[str, str]:
        """Run one round, and return the runs that failed after their retries, with the reason."""
        path = self.folder / TUNING
        before = read_if_any(path / CAMPAIGN_FILE)
        runs = [replace(run, number=number) for number, run in enumerate(runs, start=1)]
        content = self._content(runs, tables_in(before.get("runs")))
        manifest, lines = Manifest(path, content), self.lines.of(len(runs))
        manifest.save()
        lines.say(f"Tuning: {counted(len(runs), 'run')}, {len(content['runs'])} so far", OUTCOME_LEVEL)
        record = CampaignRecord(path, lines, continues=bool(before))
        record.opened(content, is_new=False, is_beyond_plan=False)
        with lines.shown():
            schedule = self.scheduled(runs, manifest, record, lines)
            schedule.run()
        return schedule.failures

    def _content(self, runs: Sequence[PlannedRun], earlier: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The manifest of the tuning runs: those of this round, and before them the earlier ones."""
        content = new_content(self.campaign, runs)
        known = {entry["run_name"]: entry for entry in earlier}
        for entry in content["runs"]:
            # Only final runs are followed up.
            entry |= {"attempts": known.get(entry["run_name"], entry)["attempts"], "followed_up": True}
        others = (entry for entry in earlier if entry["run_name"] not in {run.name for run in runs})
        content["runs"] = [*others, *content["runs"]]
        content["conditions"] = list(dict.fromkeys(entry["condition"] for entry in content["runs"]))
        content["sha256"] = hash_of({"tuning": content["sha256"]})  # another campaign than the final runs
        return content | {"seeds": self.tune.seeds, "num_runs": len(content["runs"])}

    def _record(self, choices: Sequence[Search]) -> dict[str, Any]:
        """Everything that was tried, as the manifest keeps it."""
        tune, conditions = self.tune, dict[str, dict[str, Any]]()
        for choice in choices:
            empty: dict[str, Any] = {"runs": 0, "tokens": 0, "trials": [], "chosen": []}
            found, best = conditions.setdefault(choice.condition.label, empty), choice.best
            found["chosen"] += [{"for_seed": choice.seed, "values": dict(best.params)}] if best else []
            for each in choice.trials:
                tokens, state = each.user_attrs.get(SPENT, 0), each.state.name.lower()
                trial = {"for_seed": choice.seed, "number": each.number, "values": dict(each.params), "state": state}
                found["trials"].append(trial | {"value": None if state == "fail" else each.value, "tokens": tokens})
                found["runs"], found["tokens"] = found["runs"] + len(tune.seeds), found["tokens"] + tokens
        head = {"metric": str(tuning_metric(self.campaign.table)), "direction": str(self._direction)}
        keys = {each.path: str(each) for each in self.campaign.ranges}
        return {**tune.model_dump(mode="json"), **head, "keys": keys, "conditions": conditions}

    def _outcome(self, run: PlannedRun) -> tuple[float | None, int]:
        """Return the metric of a run, and the tokens that it sampled."""
        metric = tuning_metric(self.campaign.table)
        try:
            curves = Run(run.folder).curves({metric.field, TOKENS})
        except ConfigError:
            return None, 0
        steps, tokens = along(curves, Align.STEPS), along(curves, Align.TOKENS)
        value = value_at(steps, metric, budget=run.max_steps, direction=self._direction) if steps else None
        return value, int(tokens.total) if tokens else 0
