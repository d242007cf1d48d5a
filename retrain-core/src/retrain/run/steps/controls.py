"""Controls: runs that differ from a condition in one thing, so that their gains are not learnt from the answers.

Random rewards raised held-out rates by up to 21 points (Shao et al. 2025, arXiv:2506.10947), and a reward that the form
of an answer can earn teaches the form. A gain counts only beyond the condition's own controls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from retrain.credit.custom import WrappedAlgorithm
from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.algorithm import Algorithm, Credit
from retrain.kernel.contracts.tasks import Prompt, Streams, Verifier
from retrain.kernel.errors import ConfigError, PluginError, Problem
from retrain.kernel.parts import Planned, Sample, Sampled
from retrain.kernel.progress import Clock
from retrain.kernel.seeding import Seeds, generator
from retrain.kernel.types import Completion, Group, Outcome, Score, prefix_of
from retrain.records.run import Control, control_label
from retrain.tasks.tasks import Tasks

KEY = "training.control"
# As in arXiv:2506.10947, whose gains from random rewards this control measures.
RANDOM_RATE = 0.5
MEANINGS = {
    Control.RANDOM_REWARD: f"training rewards every completion by a coin that pays {RANDOM_RATE:.0%} of the time",
    Control.FORMAT_ONLY: "training rewards every answer that the verifier can read, right or wrong",
    Control.NO_UPDATE: "no optimizer step is made",
}


def control_problems(config: Config) -> Iterator[Problem]:
    control, provider = Control(config.training.control), config.environment.provider
    names, where, fix = [*config.reward.weights] or [config.reward.type], config.place(KEY), 'use control = "no_update"'
    if control is Control.NO_UPDATE:
        return
    if config.teacher.is_set or config.distil.teacher:
        what = f"{config.training.control} replaces the reward, and here a teacher teaches as well"
        yield Problem(code="config.control-and-teacher", where=where, what=what, fix=fix)
    elif "none" in names and not provider:
        what = f"{config.training.control} replaces the reward, and reward 'none' gives none"
        yield Problem(code="reward.judges-nothing", where=where, what=what, fix=fix)
    elif control is Control.FORMAT_ONLY and provider:
        what = f"environment {provider!r} does not say which answers it can read, so their form cannot be rewarded"
        yield Problem(code="reward.no-answer-form", where=where, what=what, fix=fix)


def controlled_sampling(config: Config, seeds: Seeds, tasks: Tasks) -> Callable[[Sample], Sample]:
    """Wrap the sampling of a step under `[training] control`.

    Training then sees the control's scores wherever it looks: in credit, in the choice of informative groups, in its
    records. `verifier_correct_rate` keeps the true verifier's. ConfigError when a reward cannot be controlled.
    """
    control = config.training.control
    if control in ("", "no_update"):
        return lambda sample: sample
    payments = list[tuple[str, _Pays, dict[str, float]]]()
    for each in tasks.each:
        weights = dict(each.context.config.reward.weights) or dict.fromkeys(each.verifier.names, 1.0)
        is_random = control == "random_reward"
        pays = _coins(seeds, tuple(weights)) if is_random else _forms(each.verifier, where=config.place(KEY))
        payments.append((prefix_of(each.name), pays, weights))

    def select(sample: Sample) -> Sample:
        def controlled(planned: Planned, clock: Clock) -> Sampled:
            sampled = sample(planned, clock)
            groups = tuple(map(_with_scores, sampled.prompts, sampled.groups)) if sampled.groups else ()
            return replace(sampled, groups=groups, metrics={**sampled.metrics, **_true_rate(sampled.groups)})

        return controlled

    def _with_scores(prompt: Prompt, group: Group) -> Group:
        found = zip(group.completions, group.raw_scores, strict=True)
        _, pays, weights = next(each for each in payments if group.example.id.startswith(each[0]))
        scores = tuple(
            replace(_score(pays(prompt, number, completion), weights), shadow=score.shadow)
            for number, (completion, score) in enumerate(found)
        )
        if group.greedy:
            paid = _score(pays(prompt, len(scores), group.greedy), weights)
            return replace(group, scores=scores, raw_scores=scores, greedy_score=paid)
        return replace(group, scores=scores, raw_scores=scores)

    return select


def controlled_algorithm(algorithm: Algorithm, config: Config) -> Algorithm:
    """The algorithm under `[training] control`: its lines say so, and with `no_update` nothing is trained."""
    control = config.training.control
    return _Controlled(algorithm, Control(control)) if control else algorithm


def _reader(answer_in: Callable[[str], object], name: str) -> Callable[[str], bool]:
    """Return a test for an answer that a reward can read; PluginError when its `answer_in` fails."""

    def reads(text: str) -> bool:
        try:
            return bool(answer_in(text))
        except Exception as error:
            # A plugin may raise anything, and a failed reading must not count as no answer.
            what = f"answer_in of reward {name!r} raised {type(error).__name__}: {error}"
            fix = "repair that reward"
            raise PluginError(Problem(code="plugin.raised", where="[reward]", what=what, fix=fix)) from error

    return reads


_Pays = Callable[[Prompt, int, Completion], Sequence[bool]]  # one answer per reward


def _coins(seeds: Seeds, names: Sequence[str]) -> _Pays:
    """A coin per completion and reward, from a separate stream: the same after a resume, whatever the batch size."""
    streams = Streams(seeds=seeds, purpose=Control.RANDOM_REWARD)

    def pays(prompt: Prompt, number: int, completion: Completion) -> list[bool]:
        tosses = generator(streams.of(prompt, number)).random(len(names))
        return [bool(toss < RANDOM_RATE) for toss in tosses]

    return pays


def _forms(verifier: Verifier, *, where: str) -> _Pays:
    named = list(zip(verifier.names, verifier.rewards, strict=True)) if verifier.rewards else []
    unable = [name for name, reward in named if not hasattr(reward, "answer_in")] or [*verifier.names[len(named) :]]
    if unable:
        what = f"reward {unable[0]!r} does not say which answers it can read, so their form cannot be rewarded"
        why = "format_only needs the optional method answer_in(text) -> str | None of a reward"
        fix = 'use control = "random_reward" or "no_update", or give the reward that method'
        raise ConfigError(Problem(code="reward.no-answer-form", where=where, what=what, why=why, fix=fix))
    readers = [_reader(getattr(reward, "answer_in"), name) for name, reward in named]  # noqa: B009 - optional

    def pays(prompt: Prompt, number: int, completion: Completion) -> list[bool]:
        seen = completion.text if completion.answer is None else completion.answer
        return [reads(seen) for reads in readers]

    return pays


def _score(paid: Sequence[bool], weights: Mapping[str, float]) -> Score:
    """The weighted sum of the rewards; the parts only where there are several, as in `ScoringBatch`."""
    parts = {name: float(pays) for name, pays in zip(weights, paid, strict=True)}
    score = Score.of(sum(weights[name] * part for name, part in parts.items()))
    return replace(score, parts=parts) if len(parts) > 1 else score


def _true_rate(groups: Sequence[Group]) -> dict[str, float]:
    rights = [
        score.value is not None and score.value > group.correct_above
        for group in groups
        for score in group.raw_scores
        if score.outcome is Outcome.SCORED
    ]
    return {"verifier_correct_rate": sum(rights) / len(rights)} if rights else {}


class _Controlled(WrappedAlgorithm):
    def __init__(self, algorithm: Algorithm, control: Control) -> None:
        super().__init__(algorithm)
        self._control = control

    @property
    def labels(self) -> Mapping[str, str]:
        labels = self.algorithm.labels
        return {**labels, "condition": control_label(labels["condition"], self._control)}

    def assign(self, step: int, groups: Sequence[Group]) -> Credit:
        credit = self.algorithm.assign(step, groups)
        return replace(credit, rows=()) if self._control is Control.NO_UPDATE else credit
