"""Classic environments: `load_environment(...)` gives an object with a data set, a rubric and a rollout loop."""

from __future__ import annotations

import importlib
import inspect
import math
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from retrain.api import LoadedData, Score, installed_version
from retrain_rewards.environments.episode import MODEL, Episode, score_of
from retrain_rewards.environments.loop import reason_of
from retrain_rewards.environments.verifiers_library.settings import Settings, Tasks

TRAINABLE = "primeintellect/gsm8k, primeintellect/wordle"
# Kinds that need more than this process; known by class names, because importing them needs more as well.
FOREIGN = {
    **dict.fromkeys(("SandboxEnv", "CliAgentEnv", "ComposableEnv"), "a sandbox"),
    "BrowserEnv": "a browser",
    "OpenEnvEnv": "its own server",
}


class Classic:
    """One classic environment; its rollouts run unchanged, with `PolicyClient` in place of a server."""

    def __init__(self, settings: Settings, module: ModuleType) -> None:
        self.settings = settings
        self.module = module
        self._env: Any = None  # from `load` on, as its rows
        self._rows: Any = None
        self._tasks = Tasks(settings=settings)

    def load(self) -> LoadedData:
        self._check_args()
        self._env = self._made()
        for part in _family(self._env):
            for base in type(part).__mro__:
                if base.__name__ in FOREIGN:
                    what = f"{self.settings.id!r} is a {base.__name__} and needs {FOREIGN[base.__name__]}"
                    fix = "choose an environment of text and tools that run in this process"
                    raise self.settings.problem("id", code="environment.foreign-runtime", what=what, fix=fix)
            # It would count the time of the policy; `timeout_s` does not.
            part.timeout_seconds = None
            part.logger.addFilter(lambda record: "TurnLimitError" not in record.getMessage())
        self._rows = self._read()
        for place in range(len(self._rows)):
            row = self._rows[place]
            self._tasks.add(
                place,
                prompt=row["prompt"],
                reference=row.get("answer"),
                task=row["task"] if isinstance(row.get("task"), str) else "",
                info=row,
                identity={name: value for name, value in row.items() if name != "example_id"},
            )
        return self._tasks.loaded(f"classic, verifiers {installed_version('verifiers')}")

    async def play(self, episode: Episode) -> None:
        from retrain_rewards.environments.verifiers_library.classic_hooks import PolicyClient

        if episode.example.id not in self._tasks.handles:
            episode.failure = f"{self.settings.id} has no task {episode.example.id}"
            return
        row = dict(self._rows[self._tasks.handles[episode.example.id]])
        if isinstance(row.get("task"), str):
            # A name in older data sets, where the library expects an encoded table.
            del row["task"]
        state = await self._env.rollout(row, PolicyClient(episode), MODEL, {})
        error = state.get("error")
        if error is not None and episode.hit_turn_limit:
            state["error"] = None
            state["is_truncated"] = True
            state["stop_condition"] = "retrain_max_turns"
        elif error is not None:
            episode.failure = f"the rollout failed: {reason_of(error)}"
        episode.result = state
        # Read before scoring, which writes the score into each turn that has no reward.
        rewards = [step.get("reward") for step in state.get("trajectory") or ()]
        if any(rewards):
            episode.turn_rewards = tuple(float(reward or 0.0) for reward in rewards)
            if not all(map(math.isfinite, episode.turn_rewards)):
                episode.failure, episode.turn_rewards = "a turn's reward is not a finite number", ()

    async def score(self, group: Sequence[Episode]) -> None:
        """Apply the environment's rubric to the whole group; an exception of a function that counts is a failure."""
        from retrain_rewards.environments.verifiers_library.classic_hooks import (
            FAILURES,
            MISSING,
            watch_reward_functions,
        )

        watch_reward_functions()
        states = [episode.result for episode in group]
        rubric = self._env.rubric
        await rubric.score_group(states)
        for episode, state in zip(group, states, strict=True):
            missing = state.get(MISSING) or ()
            metrics = {name: value for name, value in (state.get("metrics") or {}).items() if name not in missing}
            failures = state.get(FAILURES)
            scored = score_of(state.get("reward"), metrics)
            episode.score = Score.failed("; ".join(failures)) if failures else scored
            await rubric.cleanup(state)

    def _made(self) -> Any:
        # Read when the library is imported.
        os.environ.setdefault("VF_LOG_LEVEL", "WARNING")
        library = importlib.import_module("verifiers")
        importlib.import_module("datasets").disable_progress_bars()
        with _signals_kept():
            try:
                env = library.load_environment(self.settings.library_id, **self.settings.args)
            except BaseException as error:  # an environment may raise anything, and exit
                if isinstance(error, KeyboardInterrupt):
                    raise
                what = f"{self.settings.id!r} could not be made: {reason_of(error)}"
                fix = "see [environment] args and the environment's own notes on keys and requirements"
                raise self.settings.problem("id", code="environment.not-made", what=what, fix=fix) from error
        if not (hasattr(env, "rollout") and hasattr(env, "rubric") and hasattr(env, "build_dataset")):
            what = f"load_environment of {self.module.__name__!r} returned a {type(env).__name__}, not an environment"
            fix = "use an environment of the verifiers library"
            raise self.settings.problem("id", code="environment.not-an-environment", what=what, fix=fix)
        return env

    def _read(self) -> Any:
        try:
            rows = self._env.build_dataset()
        except Exception as error:
            what = f"the data of {self.settings.id!r} could not be loaded: {reason_of(error)}"
            fix = "check [environment] args and the connection"
            raise self.settings.problem("id", code="environment.tasks-unreadable", what=what, fix=fix) from error
        if rows is None:
            what = f"{self.settings.id!r} is for evaluation only: it has no training data set"
            fix = f"choose one that can be trained on, for example {TRAINABLE}"
            raise self.settings.problem("id", code="environment.evaluation-only", what=what, fix=fix)
        if not getattr(self._env, "score_rollouts", True):
            what, fix = f"{self.settings.id!r} does not score its rollouts", "set score_rollouts = true in its args"
            raise self.settings.problem("id", code="environment.unscored", what=what, fix=fix)
        return rows

    def _check_args(self) -> None:
        parameters = inspect.signature(self.module.load_environment).parameters
        if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            return
        unknown = [name for name in self.settings.args if name not in parameters]
        if unknown:
            near = get_close_matches(unknown[0], list(parameters), n=1)
            fix = f"use {near[0]!r}" if near else f"known: {', '.join(parameters) or 'none'}"
            what = f"{self.settings.id!r} takes no argument {unknown[0]!r}"
            raise self.settings.problem("args", code="environment.unknown-argument", what=what, fix=fix)


def _family(env: Any) -> list[Any]:
    return [env, *(one for part in getattr(env, "envs", None) or () for one in _family(part))]


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep the library from installing its own handlers of SIGINT and SIGTERM."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
