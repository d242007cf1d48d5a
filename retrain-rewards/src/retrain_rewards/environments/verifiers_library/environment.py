"""The `verifiers` environment: tasks, interaction and scoring of any environment of that library."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from retrain.api import EpisodeResult, Example, LoadedData, Observation, PluginContext, Score, install_line
from retrain_rewards.environments.arguments import require_library
from retrain_rewards.environments.episode import Episode
from retrain_rewards.environments.loop import EpisodeLoop, PlayedEnvironment, reason_of
from retrain_rewards.environments.verifiers_library.locate import find_module
from retrain_rewards.environments.verifiers_library.settings import Settings

if TYPE_CHECKING:
    from retrain_rewards.environments.verifiers_library.classic import Classic
    from retrain_rewards.environments.verifiers_library.tasksets import Tasksets

LOAD_SEED = 0  # of the global generators while tasks are made, so that they are the same in every run


class VerifiersEnvironment(PlayedEnvironment[Settings]):
    """An environment of the verifiers library, classic or v1.

    Its own rollout code runs, with a client in place of a server, and each call of that client is an observation.
    """

    _generation: Classic | Tasksets | None = None  # from `load` on

    def load(self) -> LoadedData:
        """All tasks, the same in every run; ConfigError when the environment is missing, foreign, or has no tasks."""
        _seed_generators(LOAD_SEED)
        generation = _generation(self.settings)
        data = generation.load()
        self._generation = generation
        return data

    def reset(self, examples: Sequence[Example]) -> Mapping[int, Observation]:
        """Start one episode per entry; the same entries give the same draws of the global random generators.

        Returns within `timeout_s`, as `step` does.
        """
        self._loaded()
        if self._loop is None:
            max_turns = self.settings.max_turns if self.settings.max_turns > 0 else None
            self._loop = EpisodeLoop(self.settings.timeout_s, max_turns=max_turns)
        names = json.dumps([self.settings.seed, *(example.id for example in examples)])
        _seed_generators(int.from_bytes(hashlib.blake2b(names.encode(), digest_size=4).digest(), "little"))
        return super().reset(examples)

    def results(self) -> Sequence[EpisodeResult]:
        """Score the episodes, those of one example together, within `timeout_s`; the results in order.

        An episode that is still open gets no further action: it ends as at a turn limit, and is scored as it stands.
        """
        loop, generation = self._started(), self._loaded()
        loop.close()
        by_example = [list(group) for _, group in itertools.groupby(loop.episodes, lambda one: one.example.id)]
        groups = [[episode for episode in group if not episode.failure] for group in by_example]
        groups = [group for group in groups if group]
        failures = loop.run(loop.each([generation.score(group) for group in groups]))
        for group, failure in zip(groups, failures, strict=True):
            for episode in group:
                episode.failure = failure
        return [self._result(episode) for episode in loop.episodes]

    async def _play(self, episode: Episode) -> None:
        await self._loaded().play(episode)

    def _result(self, episode: Episode) -> EpisodeResult:
        score = episode.score
        if episode.failure or score is None:
            score = Score.failed(episode.failure or "the environment gave no score")
        return EpisodeResult(score=score, hit_turn_limit=episode.hit_turn_limit)

    def _loaded(self) -> Classic | Tasksets:
        if self._generation is None:
            raise RuntimeError("load() comes first")
        return self._generation


def make_verifiers(context: PluginContext) -> VerifiersEnvironment:
    """The environment that `[environment]` names; ConfigError on faults found without importing the library."""
    settings = Settings.of(context)
    require_library(context, "verifiers", "verifiers")
    return VerifiersEnvironment(settings)


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # environments draw from the global generators, not from ours


def _generation(settings: Settings) -> Classic | Tasksets:
    """Classic when the environment offers `load_environment` and the library still knows that; v1 otherwise."""
    module = find_module(settings)
    has_classic = importlib.util.find_spec("verifiers.legacy") is not None
    is_classic = callable(getattr(module, "load_environment", None))
    try:
        if is_classic and has_classic:
            from retrain_rewards.environments.verifiers_library.classic import Classic

            return Classic(settings, module)
        from retrain_rewards.environments.verifiers_library.tasksets import Tasksets
    except ImportError as error:
        what = f"the installed verifiers cannot be used: {reason_of(error)}"
        raise settings.problem("id", what, fix=install_line("retrain-rewards", "verifiers")) from error
    return Tasksets(settings, module, is_classic=is_classic)
