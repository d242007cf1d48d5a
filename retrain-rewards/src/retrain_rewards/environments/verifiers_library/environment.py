"""The `verifiers` environment: tasks, interaction and scoring of any environment of that library."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from retrain.api import (
    EpisodeResult,
    Example,
    LoadedData,
    Observation,
    PluginContext,
    Score,
    install_line,
    installed_dependents,
)
from retrain_rewards.environments.episode import Episode
from retrain_rewards.environments.loop import EpisodeLoop, PlayedEnvironment, reason_of, require_library
from retrain_rewards.environments.verifiers_library.settings import Settings

if TYPE_CHECKING:
    from retrain_rewards.environments.verifiers_library.classic import Classic
    from retrain_rewards.environments.verifiers_library.tasksets import Tasksets


LOAD_SEED = 0  # of the global generators while tasks are made, so that they are the same in every run


class VerifiersEnvironment(PlayedEnvironment[Settings]):
    """An environment of the verifiers library: its own rollout code calls a client in place of a server."""

    _generation: Classic | Tasksets  # from `load` on

    def load(self) -> LoadedData:
        """Return all tasks, the same in every run; ConfigError if the environment is missing, foreign or empty."""
        _seed_generators(LOAD_SEED)
        self._generation = _generation(self.settings)
        data = self._generation.load()
        max_turns = self.settings.max_turns if self.settings.max_turns > 0 else None
        self._loop = EpisodeLoop(self.settings.timeout_s, max_turns=max_turns)
        return data

    def reset(self, examples: Sequence[Example]) -> Mapping[int, Observation]:
        """Start one episode per entry; the same entries give the same draws of the global random generators."""
        names = json.dumps([self.settings.seed, *(example.id for example in examples)])
        _seed_generators(int.from_bytes(hashlib.blake2b(names.encode(), digest_size=4).digest(), "little"))
        return super().reset(examples)

    def results(self) -> Sequence[EpisodeResult]:
        """Score the episodes, each example's together; an open one ends as at a turn limit."""
        loop, generation = self._started(), self._generation
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
        await self._generation.play(episode)

    def _result(self, episode: Episode) -> EpisodeResult:
        score = episode.score
        if episode.failure or score is None:
            score = Score.failed(episode.failure or "the environment gave no score")
        limit = episode.hit_turn_limit
        return EpisodeResult(score=score, hit_turn_limit=limit, turn_rewards=episode.turn_rewards)


def make_verifiers(context: PluginContext) -> VerifiersEnvironment:
    settings = Settings.of(context)
    require_library(context, "verifiers", "verifiers")
    return VerifiersEnvironment(settings)


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    # Environments draw from the global generators, not from the run's.
    np.random.seed(seed)


def _generation(settings: Settings) -> Classic | Tasksets:
    """Return Classic if the environment has `load_environment` and the library still knows that; v1 otherwise."""
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
        fix = f"install it: {install_line('retrain-rewards', 'verifiers')}"
        raise settings.problem("id", code="environment.library-unusable", what=what, fix=fix) from error
    return Tasksets(settings, module, is_classic=is_classic)


BUILT_IN = "verifiers.v1.tasksets"


def find_module(settings: Settings) -> ModuleType:
    """Import the environment's module, with `auto_install` from its hub; ConfigError if it is missing."""
    module = _module_name(settings)
    if module is None and settings.auto_install and settings.hub_id:
        install(settings)
        importlib.invalidate_caches()
        module = _module_name(settings)
        if module is None:
            what = f"{settings.id!r} was installed, but there is still no module {_candidates(settings)[-1]!r}"
            fix = "look up the name of the package on the hub"
            raise settings.problem("id", code="environment.module-missing", what=what, fix=fix)
    if module is None:
        installed = [name for name in installed_dependents("verifiers") if "retrain" not in name]
        near = get_close_matches(settings.name.replace("_", "-"), installed, n=3)
        why = f"installed environments: {', '.join(installed[:20]) or 'none'}"
        if near:
            why = f"near names among the installed ones: {', '.join(near)}"
        fix = 'install its package, or write the id with its owner ("owner/name") and set auto_install = true'
        if settings.hub_id:
            fix = f"set auto_install = true, or run: {manual_command(settings)}"
        what = f"environment {settings.id!r} is not installed"
        raise settings.problem("id", code="environment.not-installed", what=what, why=why, fix=fix)
    try:
        return importlib.import_module(module)
    except BaseException as error:  # a module may raise anything, and exit
        if isinstance(error, KeyboardInterrupt):
            raise
        what = f"importing {module!r} failed: {type(error).__name__}: {error}"
        fix = f"make `python -c 'import {module}'` work"
        raise settings.problem("id", code="environment.import-failed", what=what, fix=fix) from error


def _candidates(settings: Settings) -> tuple[str, ...]:
    module = settings.name.replace("-", "_")
    # The library's own first, as its loader looks them up.
    return (f"{BUILT_IN}.{module.lower()}", module, module.lower())


def _module_name(settings: Settings) -> str | None:
    for module in _candidates(settings):
        try:
            if importlib.util.find_spec(module) is not None:
                return module
        except (ImportError, ValueError, AttributeError):
            continue
    return None


# An environment may have a gigabyte of requirements.
INSTALL_TIMEOUT_S = 300.0
LIBRARY_INSTALLER = "verifiers.legacy.scripts.install"  # `vf-install`; only the classic generation has it


def manual_command(settings: Settings) -> str:
    return f"pip install prime && prime env install {settings.hub_id}"


def install(settings: Settings) -> None:
    command = [sys.executable, "-m", LIBRARY_INSTALLER, settings.hub_id]
    if prime := shutil.which("prime"):
        command = [prime, "env", "install", settings.hub_id]
    environ = {**os.environ, "VIRTUAL_ENV": sys.prefix, "PYTHONIOENCODING": "utf-8"}
    try:
        done = subprocess.run(
            command,
            # An installer with a prompt would wait for ever.
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=environ,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
        reason = _reason(done.stderr) or _reason(done.stdout) or f"ended with code {done.returncode}"
    except (subprocess.TimeoutExpired, OSError) as error:
        is_late = isinstance(error, subprocess.TimeoutExpired)
        reason = f"took longer than {INSTALL_TIMEOUT_S:g} s" if is_late else str(error)
    else:
        if not done.returncode:
            return
    what = f"installing {settings.hub_id!r} from the Prime Hub failed"
    fix = f"check the name and the connection, or install it by hand: {manual_command(settings)}"
    raise settings.problem("auto_install", code="environment.install-failed", what=what, why=reason, fix=fix)


def _reason(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("  ")]
    return "\n    ".join(line[:300] for line in lines[-3:])
