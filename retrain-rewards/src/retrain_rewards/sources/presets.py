"""Well-known data sets by name: where each is on the hub, its columns, and what of its answer is the reference.

The columns are those that the data sets had in 2025; where one differs, the error names the columns that were found,
and `[data] prompt_key`, `answer_key` and `path` (a local copy, or another data set of the same shape) override these.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import ClassVar

from retrain.api import Reward
from retrain_rewards.sources.files import Hub
from retrain_rewards.sources.rows import Row, refused
from retrain_rewards.sources.table_source import Extract, Task
from retrain_rewards.verifiers.countdown import CountdownReward, question

MOST_NUMBERS = 8  # of a puzzle, given by data that nobody checked
# What surrounds the problems of DAPO-Math, and asks for another form of answer than [data] instruction does.
_DAPO_HEAD = re.compile(
    r"\ASolve the following math problem step by step\..*?is the answer to the problem\.\s*", re.DOTALL
)
_DAPO_TAIL = re.compile(r"\s*Remember to put your answer on its own line after \"Answer:\"\.\s*\Z")


class Gsm8k(Hub):
    """Grade-school word problems (Cobbe et al. 2021): 7,473 to train on, 1,319 in the test split."""

    name: ClassVar[str] = "gsm8k"
    hub_id: ClassVar[str] = "openai/gsm8k"
    subset: ClassVar[str] = "main"
    prompt_key: ClassVar[str] = "question"
    extract: ClassVar[Extract] = "hashes"


class DeepScaler(Hub):
    """Competition mathematics of DeepScaleR (2025), about 40,000 problems."""

    name: ClassVar[str] = "deepscaler"
    hub_id: ClassVar[str] = "agentica-org/DeepScaleR-Preview-Dataset"
    prompt_key: ClassVar[str] = "problem"


class DapoMath(Hub):
    """Competition mathematics with integer answers (DAPO, 2025): about 17,000 problems, each in many copies.

    The prompts ask for "Answer: ..." at the end. That is taken off, so that `[data] instruction` alone says where the
    answer goes.
    """

    name: ClassVar[str] = "dapo-math"
    hub_id: ClassVar[str] = "BytedTsinghua-SIA/DAPO-Math-17k"
    answer_key: ClassVar[str] = "reward_model.ground_truth"

    def task(self, row: Row) -> Task:
        """The bare problem; a chat of one message becomes its text."""
        task = super().task(row)
        prompt = task.prompt
        if not isinstance(prompt, str) and len(prompt) == 1:
            prompt = str(prompt[0]["content"])
        if isinstance(prompt, str):
            prompt = _DAPO_TAIL.sub("", _DAPO_HEAD.sub("", prompt))
        return replace(task, prompt=prompt)


class Countdown(Hub):
    """Number puzzles (TinyZero, 2025), about 490,000: reach a target with each of three or four numbers, used once.

    The question is made from the columns, and the verifier checks the expression: there is no single right answer.
    """

    name: ClassVar[str] = "countdown"
    hub_id: ClassVar[str] = "Jiayi-Pan/Countdown-Tasks-3to4"
    prompt_key: ClassVar[str] = "nums"
    answer_key: ClassVar[str] = "target"
    reward: ClassVar[Reward | None] = CountdownReward()

    def task(self, row: Row) -> Task:
        """The question about one row's numbers; ConfigError when they are none."""
        numbers, target = row.values.get(self.keys["prompt_key"]), row.values.get(self.keys["answer_key"])
        given = [*numbers, target] if isinstance(numbers, list) else []
        if not 1 < len(given) <= MOST_NUMBERS + 1 or not all(type(each) is int for each in given):
            what = f"not a puzzle: {numbers!r:.60} and {target!r:.60}"
            fix = f"give a list of 1 to {MOST_NUMBERS} whole numbers and a whole number as the target"
            raise refused(row.place, what, fix)
        # numbers and target stay in `info`, where the verifier finds them
        return Task(prompt=question(given[:-1], given[-1]), reference=None, used=frozenset())
