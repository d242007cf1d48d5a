"""Configurations to try, from Optuna: a study for each choice, all in one journal that a killed campaign reads again.

A study is asked in one process, in the order of its trials, by a sampler that is seeded for each trial: it suggests the
same configurations whether or not the campaign was interrupted.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.kernel.seeding import Seeds
from retrain.records.tune_table import Range, TuneTable

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

# Optuna's default of 10 random trials would use up the whole budget of most choices.
TPE_STARTUP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One configuration: `values` by path, and the value of the metric; None if it failed or has not ended."""

    number: int
    values: Mapping[str, Any]
    state: str
    value: float | None
    tokens: int
    num_rungs: int  # decisions that it has passed


def open_journal(file: Path) -> BaseStorage:
    """Open the journal of a campaign that this process has locked, and repair the effects of a kill."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    file.with_name(f"{file.name}.lock").unlink(missing_ok=True)
    if file.exists():
        # Optuna refuses a journal in which a line follows a torn one.
        content = file.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            file.write_bytes(whole)
    return JournalStorage(JournalFileBackend(str(file)))


class Search:
    """The trials of one choice: `name` identifies it in the journal, `stream` its random values."""

    def __init__(
        self,
        journal: BaseStorage,
        name: str,
        tune: TuneTable,
        ranges: Sequence[Range],
        *,
        num_choices: int,
        is_higher: bool,
        stream: int,
    ) -> None:
        import optuna
        from optuna.pruners import NopPruner, SuccessiveHalvingPruner

        self._journal, self._tune, self._num_choices, self._stream = journal, tune, num_choices, stream
        halving = SuccessiveHalvingPruner(min_resource=tune.min_steps, reduction_factor=tune.reduction_factor)
        self._study = optuna.create_study(
            storage=journal,
            study_name=name,
            pruner=halving if tune.pruner == "halving" else NopPruner(),
            direction="maximize" if is_higher else "minimize",
            load_if_exists=True,
        )
        self._id = journal.get_study_id_from_name(name)
        self._distributions = {each.path: _distribution(each) for each in ranges}

    @property
    def trials(self) -> list[Trial]:
        """Every trial in order, without those that a kill left before they had all their values."""
        return [self._trial(each) for each in self._frozen()]

    @property
    def best(self) -> Trial | None:
        """The best completed trial, of equal ones the first."""
        return self._trial(self._study.best_trial) if any(each.state == "complete" for each in self.trials) else None

    def active(self, at_once: int) -> list[Trial]:
        """Return the trials to run now; new ones are asked up to `at_once`, within the budget."""
        while sum(each.state == "running" for each in self.trials) < at_once and self._has_budget:
            self._study.sampler = self._sampler(len(self.trials))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of features that Optuna calls experimental
                self._study.ask(self._distributions)
        return [each for each in self.trials if each.state == "running"]

    def report(self, trial: Trial, value: float | None, *, steps: int, tokens: int) -> None:
        """Record a trial's value after so many steps; None if it failed."""
        number = self._number(trial)
        self._journal.set_trial_user_attr(number, "tokens", tokens)
        if value is None:
            from optuna.trial import TrialState

            self._study.tell(trial.number, state=TrialState.FAIL)
        else:
            self._journal.set_trial_intermediate_value(number, steps, value)

    def decide(self, trial: Trial, *, is_last: bool) -> None:
        """Complete, prune or continue a trial whose value was reported."""
        from optuna.trial import TrialState

        frozen = self._journal.get_trial(self._number(trial))
        if frozen.state is not TrialState.RUNNING:
            return
        if is_last:
            self._study.tell(trial.number, frozen.intermediate_values[max(frozen.intermediate_values)])
        elif self._study.pruner.prune(self._study, frozen):
            self._study.tell(trial.number, state=TrialState.PRUNED)

    def _number(self, trial: Trial) -> int:
        return self._journal.get_trial_id_from_study_id_trial_number(self._id, trial.number)

    def _frozen(self) -> list[FrozenTrial]:
        return [each for each in self._study.get_trials(deepcopy=False) if len(each.params) == len(self._distributions)]

    def _trial(self, frozen: FrozenTrial) -> Trial:
        is_valued = frozen.state.name in ("COMPLETE", "PRUNED")
        return Trial(
            number=frozen.number,
            values=dict(frozen.params),
            state=frozen.state.name.lower(),
            value=frozen.value if is_valued else None,
            tokens=int(frozen.user_attrs.get("tokens", 0)),
            num_rungs=len(frozen.intermediate_values),
        )

    @property
    def _has_budget(self) -> bool:
        if self._tune.runs:
            return len(self.trials) * len(self._tune.seeds) * self._num_choices < self._tune.runs
        return sum(each.tokens for each in self.trials) * self._num_choices < self._tune.tokens

    def _sampler(self, number: int) -> BaseSampler:
        from optuna import samplers

        seeds = Seeds(self._tune.search_seed)
        seed = seeds.derive("tune", self._stream, number) % 2**32
        match self._tune.sampler:
            case "quasi_random":  # one sequence for all trials, whose place is in the journal
                seed = seeds.derive("tune", self._stream) % 2**32
                return samplers.QMCSampler(scramble=True, seed=seed, warn_independent_sampling=False)
            case "tpe":
                return samplers.TPESampler(seed=seed, n_startup_trials=TPE_STARTUP, constant_liar=True)
        return samplers.RandomSampler(seed=seed)


def _distribution(each: Range) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if each.choices:
        return CategoricalDistribution(each.choices)
    if each.is_whole:
        return IntDistribution(int(each.low), int(each.high), log=each.is_log)
    return FloatDistribution(each.low, each.high, log=each.is_log)
