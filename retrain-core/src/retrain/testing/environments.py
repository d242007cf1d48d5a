"""The suite of environments: play many episodes side by side, end them all, and work in another process."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

from retrain.kernel.contracts.tasks import Action, EpisodeResult, Observation
from retrain.kernel.types import Example, Outcome, Score, StopReason
from retrain.tasks.environment import EnvironmentProcess
from retrain.tasks.scoring.build import brings_tasks
from retrain.tasks.scoring.verdict import verdict
from retrain.testing.bench import Bench
from retrain.testing.check import expect, expect_json
from retrain.testing.data_sources import expect_examples, expect_plain_examples, expect_unique_ids
from retrain.testing.toys import HOSTILE, TOYS

# Far beyond any task's own limit: an episode still open then would keep a run waiting forever.
MAX_TURNS = 128
GROUP_SIZE = 2
TIMEOUT_S = 60.0
HARMLESS = ("1", r"\boxed{2}", "I do not know.")


def gives_tasks(bench: Bench) -> None:
    """`load` returns LoadedData with tasks of plain data and unique ids, or without tasks if it plays `[data]`."""
    data = bench.build().load()
    if not brings_tasks(bench.config, bench.plugins):
        expect(
            not data.examples,
            f"load() gave {len(data.examples)} examples, but by its registration it plays the examples of [data]",
            why="a run takes its tasks from one of the two",
            fix="return LoadedData(examples=()), or omit the traits",
        )
        return
    expect_examples(data)
    expect_unique_ids(data)
    expect_plain_examples(data.examples)


def plays_in_a_process_of_its_own(bench: Bench) -> None:
    """Sent to another process as in a run, it plays an episode of a group there to the end."""
    process = EnvironmentProcess(
        bench.build(), name=bench.name, timeout_s=TIMEOUT_S, memory_gb=bench.config.scoring.memory_gb
    )
    bench.closing(process.close)
    examples = process.load().examples or TOYS
    _expect_results(_play(process, examples[:1] * GROUP_SIZE, HARMLESS), GROUP_SIZE)


def plays_episodes_side_by_side(bench: Bench) -> None:
    """Groups of several tasks are played together, and `results` returns one result per episode."""
    environment, examples = _loaded(bench)
    chosen = [example for example in examples[:3] for _ in range(GROUP_SIZE)]
    _expect_results(_play(environment, chosen, HARMLESS), len(chosen))


def asks_in_plain_data(bench: Bench) -> None:
    """An observation is a text or a chat, and tools as JSON schemas."""
    environment, examples = _loaded(bench)
    for observations in _play(environment, examples[:2], HARMLESS)[0]:
        for number, observation in observations.items():
            expect(
                isinstance(observation, Observation) and 0 <= number < 2,
                f"reset() or step() returned {number!r}: {observation!r:.100}",
                why="the number identifies the waiting episode, and the policy sees the Observation",
                fix="return {number of the episode: retrain.api.Observation(prompt=...)}",
            )
            expect_json(
                [observation.prompt, list(observation.tools)],
                f"the observation of episode {number}",
                why="it crosses a process boundary and goes into the chat template",
                fix="use plain text, lists and dictionaries in Observation.prompt and Observation.tools",
            )


def survives_hostile_replies(bench: Bench) -> None:
    """Whatever the policy writes, episodes end, and their scores are valid."""
    environment, examples = _loaded(bench)
    texts = list(HOSTILE.values())
    chosen = (list(examples) * len(texts))[: len(texts)]
    _expect_results(_play(environment, chosen, texts, by_episode=True), len(chosen), failures=True)


def ends_when_the_context_is_full(bench: Bench) -> None:
    """Empty, truncated actions, one after the other, end an episode."""
    environment, examples = _loaded(bench)
    _expect_results(_play(environment, examples[:2], ("",), stop=StopReason.LENGTH), len(examples[:2]), failures=True)


def drops_what_was_left_open(bench: Bench) -> None:
    """`reset` in the middle of other episodes drops those."""
    environment, examples = _loaded(bench)
    environment.reset([examples[0]] * 3)
    _expect_results(_play(environment, examples[:1], HARMLESS), 1)


def _loaded(bench: Bench) -> tuple[Any, Sequence[Example]]:
    """The environment as another process would receive it, and its tasks."""
    # A run pickles the environment into its process; attributes that do not survive that show here.
    environment = pickle.loads(pickle.dumps(bench.build()))
    return environment, environment.load().examples or TOYS


def _play(
    environment: Any,
    examples: Sequence[Example],
    texts: Sequence[str],
    *,
    by_episode: bool = False,
    stop: StopReason = StopReason.EOS,
) -> tuple[list[Mapping[int, Observation]], Sequence[EpisodeResult]]:
    """Play to the end; every episode gets the texts in turn, or the text of its number on every turn.

    Return the observations turn by turn, and the results.
    """
    seen: list[Mapping[int, Observation]] = []
    observations = environment.reset(list(examples))
    while observations:
        turn = len(seen)
        shown = next(iter(observations.values()))
        expect(
            turn < MAX_TURNS,
            f"{len(observations)} episodes are still open after {MAX_TURNS} turns, one of them with {shown!r:.200}",
            why="a run waits until every episode has ended",
            fix="end an episode after a number of turns, with EpisodeResult(hit_turn_limit=True)",
        )
        seen.append(dict(observations))
        actions = {
            number: Action(text=texts[(number if by_episode else turn) % len(texts)], stop_reason=stop)
            for number in observations
        }
        observations = environment.step(actions)
    return seen, environment.results()


def _expect_results(played: tuple[Any, Sequence[EpisodeResult]], count: int, *, failures: bool = False) -> None:
    """Expect one valid result per episode; a failed score only if `failures` are acceptable."""
    _, results = played
    why = "a result belongs to the episode with its number"
    fix = "return one EpisodeResult for every example that reset() was given, in that order"
    expect(len(results) == count, f"results() returned {len(results)} results for {count} episodes", why=why, fix=fix)
    for number, result in enumerate(results):
        score = None
        if isinstance(result, EpisodeResult):
            score = verdict(result.score if result.answer is None else Score.no_verdict("[reward] judges the answer"))
        expect(
            score is not None and (failures or score.outcome is not Outcome.FAILED),
            f"episode {number} ended with {result!r:.300}",
            why="a failed score leaves the episode out, and a run stops when too many fail",
            fix="give EpisodeResult(score=Score.of(number)), or Score.no_verdict(reason)",
        )
