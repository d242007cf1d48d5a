"""Configurations to try, from Optuna: a study for each choice, all in one journal that a killed campaign reads again.

A study is asked in one process, in the order of its trials, by a sampler that is seeded for each trial: it suggests the
same configurations whether or not the campaign was interrupted.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import optuna
from optuna import pruners, samplers
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from retrain.campaign.load import Campaign, CheckedCondition
from retrain.campaign.tune_checks import tuned_ranges
from retrain.kernel.seeding import Seeds
from retrain.records.tune_table import Range

# Optuna's default of 10 random trials would use up the whole budget of most choices.
TPE_STARTUP = 4
TOKENS, PASSED = "tokens", "passed"  # attributes of a trial: tokens sampled, and decisions that let it continue


def open_journal(file: Path) -> BaseStorage:
    """Open the journal of a campaign that this process has locked, and repair the effects of a kill."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    file.with_name(f"{file.name}.lock").unlink(missing_ok=True)
    content = file.read_bytes() if file.exists() else b""
    if not content.endswith(b"\n"):  # Optuna refuses a journal in which a line follows a torn one
        file.write_bytes(content[: content.rfind(b"\n") + 1])
    return JournalStorage(JournalFileBackend(str(file)))


class Search:
    """One choice: the best configuration of a condition, for one final `seed` or for all (None)."""

    def __init__(
        self, campaign: Campaign, journal: BaseStorage, condition: CheckedCondition, seed: int | None, *, stream: int
    ) -> None:
        table, tune = campaign.table, campaign.table.tune
        assert tune is not None, "no [campaign.tune]"
        self.condition, self.seed, self._journal, self._tune, self._stream = condition, seed, journal, tune, stream
        self._num_choices = tune.num_choices(len(table.seeds))
        self._distributions = {
            each.path: _distribution(each) for each in tuned_ranges(condition.condition, campaign.ranges)
        }
        halving = pruners.SuccessiveHalvingPruner(min_resource=tune.min_steps, reduction_factor=tune.reduction_factor)
        self._study = optuna.create_study(
            storage=journal,
            study_name=str(self),
            pruner=halving if tune.pruner == "halving" else pruners.NopPruner(),
            direction="minimize" if table.plan and table.plan.direction == "lower" else "maximize",
            load_if_exists=True,
        )

    def __str__(self) -> str:
        return f"{self.condition.label}, {'all seeds' if self.seed is None else f'seed {self.seed}'}"

    @property
    def trials(self) -> list[FrozenTrial]:
        """Every trial in order, without those that a kill left before they had all their values."""
        return [each for each in self._study.get_trials(deepcopy=False) if len(each.params) == len(self._distributions)]

    @property
    def best(self) -> FrozenTrial | None:
        """The best completed trial, of equal ones the first."""
        return self._study.best_trial if any(each.state is TrialState.COMPLETE for each in self.trials) else None

    def active(self, at_once: int) -> list[FrozenTrial]:
        """Return the trials to run now; new ones are asked up to `at_once`, within the budget."""
        while not self._is_spent(trials := self.trials):
            if sum(not each.state.is_finished() for each in trials) >= at_once:
                break
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of features that Optuna calls experimental
                self._study.sampler = self._sampler(len(trials))
                self._study.ask(self._distributions)
        return [each for each in self.trials if not each.state.is_finished()]

    def report(self, trial: FrozenTrial, value: float | None, *, steps: int, tokens: int) -> None:
        """Record a trial's value after so many steps; None if it failed."""
        self._journal.set_trial_user_attr(trial._trial_id, TOKENS, tokens)
        if value is None:
            self._study.tell(trial.number, state=TrialState.FAIL)
        else:
            self._journal.set_trial_intermediate_value(trial._trial_id, steps, value)

    def decide(self, trial: FrozenTrial, *, is_last: bool) -> None:
        """Complete, prune or continue a trial whose value was reported."""
        now = self._journal.get_trial(trial._trial_id)
        if now.state.is_finished():
            return
        if is_last:
            self._study.tell(now.number, now.intermediate_values[max(now.intermediate_values)])
        elif self._study.pruner.prune(self._study, now):
            self._study.tell(now.number, state=TrialState.PRUNED)
        else:
            self._journal.set_trial_user_attr(now._trial_id, PASSED, now.user_attrs.get(PASSED, 0) + 1)

    def _is_spent(self, trials: Sequence[FrozenTrial]) -> bool:
        if self._tune.runs:
            return len(trials) * len(self._tune.seeds) * self._num_choices >= self._tune.runs
        return sum(int(each.user_attrs.get(TOKENS, 0)) for each in trials) * self._num_choices >= self._tune.tokens

    def _sampler(self, number: int) -> samplers.BaseSampler:
        # The quasi-random sequence is one for all trials, whose place in it is in the journal.
        place = () if self._tune.sampler == "quasi_random" else (number,)
        seed = Seeds(self._tune.search_seed).derive("tune", self._stream, *place) % 2**32
        match self._tune.sampler:
            case "quasi_random":
                return samplers.QMCSampler(scramble=True, seed=seed, warn_independent_sampling=False)
            case "tpe":
                return samplers.TPESampler(seed=seed, n_startup_trials=TPE_STARTUP, constant_liar=True)
        return samplers.RandomSampler(seed=seed)


def _distribution(each: Range) -> BaseDistribution:
    if each.choices:
        return CategoricalDistribution(each.choices)
    if each.is_whole:
        return IntDistribution(int(each.low), int(each.high), log=each.is_log)
    return FloatDistribution(each.low, each.high, log=each.is_log)
