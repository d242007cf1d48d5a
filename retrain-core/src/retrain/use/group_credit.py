"""What the run's algorithm makes of a group of answers to a question of the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retrain.credit.algorithm import build_algorithm
from retrain.credit.flow import build_flow
from retrain.kernel.contracts.tasks import Prompt, Streams
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.informative import GroupStatus
from retrain.kernel.types import Example, Floats, Group, SamplingParams, Score
from retrain.run.opened import Opened
from retrain.tasks.prompts import encode_prompts
from retrain.tasks.rollout import SingleTurn
from retrain.tasks.scoring.build import build_rewards, data_reward
from retrain.tasks.scoring.service import ScoringService
from retrain.text.token_text import token_texts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CreditedAnswer:
    """One answer of the group: its score, and the credit of each of its tokens."""

    score: Score
    texts: Sequence[str]
    credit_A: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CreditedGroup:
    """The answers, by which rules, and whether such a group would be trained."""

    condition: str
    status: GroupStatus
    answers: Sequence[CreditedAnswer]


def credit_of(source: Opened, question: str, reference: str, *, size: int, number: int) -> CreditedGroup:
    """Sample `size` answers as a step of the run would, score them with its reward, and give credit.

    `number` keeps the groups of a session apart. ConfigError when the tasks of the run are an environment's, which a
    question and an answer are not.
    """
    config = source.config
    if config.environment.provider:
        what, fix = (
            "the tasks of this run are those of an environment",
            "look at the credit of its steps: retrain credit",
        )
        raise ConfigError(Problem(where=config.place("environment.provider"), what=what, fix=fix))
    algorithm = build_algorithm(build_flow(config, source.plugins), source.context)
    example = Example(id=f"chat-{number}", prompt=question, reference=reference)
    (tokens_T,) = encode_prompts([example], source.tokenizer, config)
    params = SamplingParams(
        max_tokens=config.training.max_tokens,
        temperature=config.training.temperature,
        entropy=source.backend.capabilities.provides_entropy,
    )
    rewards = build_rewards(config, source.context, data_reward(config, source.context))
    with ScoringService(rewards, config.scoring) as scoring:
        rollouts = SingleTurn(backend=source.backend, tokenizer=source.tokenizer, scoring=scoring, params=params)
        with rollouts.batch("chat") as batch:
            streams = Streams(seeds=source.context.seeds, purpose="chat")
            (completions,) = batch.sample([Prompt(example=example, tokens_T=tokens_T)], size, streams)
            (scores,) = batch.scores()
    group = Group(example=example, completions=completions, scores=scores, correct_above=config.scoring.correct_above)
    credit = algorithm.assign(source.subject.steps or 0, [group])
    answers = [
        CreditedAnswer(
            score=score,
            texts=token_texts(source.tokenizer, completion.tokens_T[completion.action_T].tolist()),
            credit_A=tokens.advantages_A,
        )
        for completion, score, tokens in zip(completions, scores, credit.tokens_PG[0], strict=True)
    ]
    labels = algorithm.labels
    return CreditedGroup(condition=labels.get("condition", ""), status=credit.statuses_P[0], answers=answers)
