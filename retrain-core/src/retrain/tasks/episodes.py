"""Rollouts of many turns: each turn, all episodes that wait for the policy are sampled together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import (
    Action,
    Environment,
    EpisodeResult,
    Observation,
    Prompt,
    RolloutBatch,
    Streams,
)
from retrain.kernel.errors import BackendError, Problem, RewardError
from retrain.kernel.types import Completion, Outcome, Sample, SampleRequest, SamplingParams, Score, StopReason, Turns
from retrain.tasks.rollout import budget_of, draw_samples
from retrain.tasks.scoring.service import ScoringBatch, ScoringService
from retrain.tasks.scoring.verdict import part_means
from retrain.text.terminal_text import printable
from retrain.text.thinking import template_args, thinking_of
from retrain.text.transcript import Transcript

CONTEXT_IS_FULL = Action(text="", stop_reason=StopReason.LENGTH)


class ClosableEnvironment(Environment, Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Episodes:
    """Rollouts that are episodes of an environment, scored by it, or by `scoring` where it gives answers instead."""

    backend: Backend
    context: PluginContext
    environment: ClosableEnvironment
    params: SamplingParams
    context_length: int | None = None
    scoring: ScoringService | None = None

    @contextmanager
    def batch(self, label: str, failures: Path | None = None) -> Iterator[RolloutBatch]:
        if self.scoring is None:
            yield _EpisodeBatch(self)
            return
        with self.scoring.batch(label, failures) as answers:
            yield _EpisodeBatch(self, answers)

    def close(self) -> None:
        self.environment.close()
        if self.scoring is not None:
            self.scoring.close()


@dataclass(slots=True, eq=False)
class _Episode:
    prompt: Prompt
    number: int  # within its group
    transcript: Transcript
    is_full: bool = False  # the environment has its empty action: the context has no room for another answer

    def completion(self, result: EpisodeResult) -> Completion:
        cut = self.is_full or StopReason.LENGTH in self.transcript.stops
        reason = StopReason.TURNS if result.hit_turn_limit else StopReason.LENGTH if cut else StopReason.EOS
        lengths, states = tuple(self.transcript.lengths), tuple(self.transcript.states)
        turns = Turns(lengths=lengths, rewards=tuple(result.turn_rewards), states=states)
        return replace(self.transcript.completion(reason), by_turn=turns)


class _EpisodeBatch:
    def __init__(self, owner: Episodes, answers: ScoringBatch | None = None) -> None:
        self._owner, self._progress = owner, owner.context.sampling_progress
        self._answers = answers
        config = owner.context.config
        self._thinking = thinking_of(config, owner.context.tokenizer)
        self._budget = budget_of(config, self._thinking, owner.context_length)
        self._groups: list[list[_Episode]] = []
        self._results: list[EpisodeResult] = []
        self._scores: list[Score] = []

    def sample(self, prompts: Sequence[Prompt], group_size: int, streams: Streams) -> list[tuple[Completion, ...]]:
        owner, progress = self._owner, self._progress
        transcript = partial(
            Transcript,
            tokenizer=owner.context.tokenizer,
            template_args=template_args(owner.context.config, owner.context.tokenizer),
            thinking=self._thinking,
            history=owner.context.config.environment.history,
        )
        self._groups = [[_Episode(p, i, transcript()) for i in range(group_size)] for p in prompts]
        episodes = [episode for group in self._groups for episode in group]
        progress.begin("episodes", len(episodes))
        observations = owner.environment.reset([episode.prompt.example for episode in episodes])
        while observations:
            progress.add(len(episodes) - len(observations) - progress.done)
            waiting, actions = self._take_in(episodes, observations)
            actions |= self._turn(waiting, streams)
            if not actions:
                break
            observations = owner.environment.step(actions)
        progress.add(progress.total - progress.done)
        self._results = list(owner.environment.results())
        self._scores = [result.score for result in self._results]
        if len(self._results) != len(episodes):
            what = f"the environment gave {len(self._results)} results for {len(episodes)} episodes"
            fix = "repair the environment's plugin"
            raise BackendError(Problem(code="environment.wrong-results", where="[environment]", what=what, fix=fix))
        for episode in episodes:
            # An episode that failed before its first observation still needs tokens for its record.
            if not episode.transcript.tokens_T:
                self._observe(episode, Observation(prompt=episode.prompt.example.prompt))
        results = iter(self._results)
        return [tuple(e.completion(next(results)) for e in group) for group in self._groups]

    def scores(self) -> list[tuple[Score, ...]]:
        answered = {n: r.answer for n, r in enumerate(self._results) if self._answers and r.answer is not None}
        self._check_budget([score for n, score in enumerate(self._scores) if n not in answered])
        if self._answers is not None:
            episodes = [episode for group in self._groups for episode in group]
            submit = self._answers.submit
            tickets = {number: submit(episodes[number].prompt.example, text) for number, text in answered.items()}
            found = self._answers.collect()
            for number, ticket in tickets.items():
                self._scores[number] = found[ticket]
        scores = iter(self._scores)
        return [tuple(next(scores) for _ in group) for group in self._groups]

    def metrics(self) -> Mapping[str, float]:
        episodes = [episode for group in self._groups for episode in group]
        total = max(len(episodes), 1)
        return {
            "turns_mean": sum(len(e.transcript.stops) for e in episodes) / total,
            "turn_limit_rate": sum(result.hit_turn_limit for result in self._results) / total,
            "rewritten_history_count": sum(len(e.transcript.starts) - 1 for e in episodes),
            **(part_means(self._scores) if self._answers is None else self._answers.metrics()),
        }

    def _take_in(
        self, episodes: Sequence[_Episode], observations: Mapping[int, Observation]
    ) -> tuple[list[tuple[int, _Episode]], dict[int, Action]]:
        """Return the episodes to continue, and one empty action for each without room left in its context."""
        waiting: list[tuple[int, _Episode]] = []
        actions: dict[int, Action] = {}
        for number in sorted(observations):
            episode, seen = episodes[number], observations[number]
            if episode.is_full:
                continue
            if self._observe(episode, seen):
                waiting.append((number, episode))
            else:
                episode.is_full = True
                actions[number] = CONTEXT_IS_FULL
        return waiting, actions

    def _observe(self, episode: _Episode, seen: Observation) -> bool:
        try:
            state = str(seen.info.get("state_key") or "")
            return episode.transcript.observe(seen.prompt, seen.tools, limit=self._owner.context_length, state=state)
        # Templates and tokenizers of models may raise anything.
        except Exception as error:
            where = f"[environment], example {printable(episode.prompt.example.id)}"
            what = f"the chat template refuses its messages: {type(error).__name__}: {printable(str(error))[:300]}"
            fix = "repair the messages that the environment gives, or choose another chat template"
            raise RewardError(Problem(code="environment.bad-messages", where=where, what=what, fix=fix)) from error

    def _turn(self, waiting: Sequence[tuple[int, _Episode]], streams: Streams) -> dict[int, Action]:
        """Sample one action for every episode that waits, together; equal contexts of a group share a request."""
        shared: dict[tuple[int, bytes], list[tuple[int, _Episode]]] = {}
        for number, episode in waiting:
            context_T = episode.transcript.context_T
            shared.setdefault((id(episode.prompt), context_T.tobytes()), []).append((number, episode))
        requests = [
            SampleRequest(
                prompt_T=members[0][1].transcript.context_T,
                seeds_G=tuple(streams.of(e.prompt, e.number, turn=len(e.transcript.stops)) for _, e in members),
            )
            for members in shared.values()
        ]
        if not requests:
            return {}
        names = [f"example {members[0][1].prompt.example.id}" for members in shared.values()]
        before = self._progress.tokens

        def count(group: int, index: int, sample: Sample) -> None:
            self._progress.add(tokens=len(sample.tokens_T))

        owner = self._owner
        drawn = draw_samples(owner.backend, requests, owner.params, names, count, budget=self._budget)
        tokens = sum(len(sample.tokens_T) for samples in drawn for sample in samples)
        # Samples that were delivered early are counted already.
        self._progress.add(tokens=before + tokens - self._progress.tokens)
        return {
            number: Action(text=episode.transcript.take(sample), stop_reason=sample.stop_reason)
            for members, samples in zip(shared.values(), drawn, strict=True)
            for (number, episode), sample in zip(members, samples, strict=True)
        }

    def _check_budget(self, scores: Sequence[Score]) -> None:
        failed = [score for score in scores if score.outcome is Outcome.FAILED]
        allowed = self._owner.context.config.scoring.max_failed_frac
        if len(failed) > allowed * len(self._results):
            what = (
                f"the environment failed on {len(failed)} of {len(self._results)} episodes; first: {failed[0].detail}"
            )
            why = f"more than [scoring] max_failed_frac = {allowed:g} of them"
            where, fix = "[environment]", "repair the environment"
            raise RewardError(Problem(code="environment.too-many-failures", where=where, what=what, why=why, fix=fix))
