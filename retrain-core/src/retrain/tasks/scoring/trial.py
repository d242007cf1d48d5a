"""Tries the rewards of a run on a few of its rows before the backend's libraries and the model load.

That takes milliseconds in a copy of this process, and does not change the state of a reward. A reward that fails there
on every text is tried again in its scoring process, whose result counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.tasks import Prompt, Verifier
from retrain.kernel.errors import Problem, RewardError
from retrain.kernel.types import Example, Outcome
from retrain.tasks.child.process import in_copy
from retrain.tasks.scoring.build import names_a_reward
from retrain.tasks.scoring.pool import Task
from retrain.tasks.scoring.service import ScoringService
from retrain.tasks.scoring.verdict import verdict
from retrain.tasks.tasks import RewardVerifier

ROWS = 3
# A reward that takes longer is left to the audit, so that the trial delays no run.
TRIAL_S = 2.0
Pairs = Sequence[tuple[Example, str]]


def refuse_broken_rewards(verifier: Verifier, prompts: Sequence[Prompt], config: Config) -> None:
    """RewardError when a reward fails on every text of a few rows, right answers and the empty text among them.

    Left to the audit: environments, rewards that call a server (`async def score`), and those that load something in
    `prepare`, unless `is_loaded`.
    """
    if config.scoring.audit == "off" or not isinstance(verifier, RewardVerifier):
        return
    _refuse(verifier.service, prompts, config)
    if verifier.service.shadow is not None:
        _refuse(verifier.service.shadow, prompts, config, of_shadow=True)


def _refuse(service: ScoringService, prompts: Sequence[Prompt], config: Config, *, of_shadow: bool = False) -> None:
    for number, (named, limits) in enumerate(zip(service.rewards, service.limits, strict=True)):
        reward: Any = named.reward
        is_light = getattr(reward, "is_loaded", not hasattr(reward, "prepare"))
        if inspect.iscoroutinefunction(reward.score) or not is_light or limits.max_failed_frac >= 1.0:
            continue
        pairs = [(prompt.example, text) for prompt in prompts[:ROWS] for text in _texts(reward, prompt.example)]
        if _fails_in_copy(reward, pairs, config):
            is_of_source = named.name == config.data.source and not names_a_reward(config)
            path = "reward.weights" if config.reward.weights else "data.source" if is_of_source else "reward.type"
            _refuse_faulty(service, number, pairs, "reward.shadow" if of_shadow else path, config)


def _fails_in_copy(reward: Any, pairs: Pairs, config: Config) -> bool:
    def fails() -> bool:
        from retrain.tasks.child.system import limit_memory  # in the copy only

        limit_memory(int(config.scoring.memory_gb * 2**30))
        if prepare := getattr(reward, "prepare", None):
            prepare()
        for example, text in pairs:
            with suppress(Exception):  # a failed score
                if verdict(reward.score(example, text)).outcome is not Outcome.FAILED:
                    return False
        return True

    return in_copy(fails, timeout_s=TRIAL_S) is True


def _texts(reward: Any, example: Example) -> list[str]:
    texts = [rf"\boxed{{{example.reference}}}", example.reference, ""]
    with suppress(Exception):  # the audit reports a `gold` that raises
        if isinstance(gold := reward.gold(example), str):
            texts.insert(0, gold)
    return list(dict.fromkeys(texts))


def _refuse_faulty(service: ScoringService, number: int, pairs: Pairs, path: str, config: Config) -> None:
    """RewardError if a reward fails on all texts in its scoring process too; `path` is the key that names it.

    A text that takes too long ends the trial, since the next may not.
    """
    service.start()
    name, finished, details = service.names[number], SimpleQueue[Task](), list[str]()
    for example, text in pairs:
        limits = service.limits[number]
        service.submit(Task(reward=number, example=example, text=text, limits=limits, finished=finished))
        task = finished.get()
        if task.score.outcome is not Outcome.FAILED or task.last.is_timeout:
            return
        details.append(task.score.detail)
    where = config.place(path) + (f" {name}" if path == "reward.weights" else "")
    what = f"reward {name!r} failed on all {len(pairs)} texts that it was tried on; first: {details[0]}"
    why = f"they are right answers, and the empty text, for {len({e.id for e, _ in pairs})} rows of the data"
    fix = "repair the reward; `retrain audit` tries it without a run"
    raise RewardError(Problem(code="reward.always-fails", where=where, what=what, why=why, fix=fix))
