"""What an environment must do: play many episodes side by side, end them all, and travel to another process."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from retrain.kernel.contracts.tasks import Ask, Ending, Reply
from retrain.kernel.types import Example, Outcome, StopReason
from retrain.rooms.tasks.environment_process import HostedEnvironment
from retrain.rooms.tasks.scoring.verdict import verdict
from retrain.testing.bench import Bench
from retrain.testing.check import expect
from retrain.testing.data_sources import expect_examples, expect_plain_examples, expect_unique_ids
from retrain.testing.toy_tasks import HOSTILE

MAX_TURNS = 128
GROUP_SIZE = 2
TIMEOUT_S = 60.0
HARMLESS = ("1", r"\boxed{2}", "I do not know.")


@dataclass(slots=True)
class _Played:
    """What was asked turn by turn, and how it ended."""

    asked: list[Mapping[int, Ask]] = field(default_factory=list)
    endings: Sequence[Ending] = ()


def gives_tasks(bench: Bench) -> None:
    """`load` returns LoadedData with tasks of plain data, each with an id of its own."""
    data = bench.build().load()
    expect_examples(data)
    expect_unique_ids(data)
    expect_plain_examples(data.examples)


def plays_in_a_process_of_its_own(bench: Bench) -> None:
    """Sent to another process as a run sends it, it plays an episode of a group there to the end."""
    hosted = HostedEnvironment(
        bench.build(), name=bench.name, timeout_s=TIMEOUT_S, memory_gb=bench.config.scoring.memory_gb
    )
    bench.closing(hosted.close)
    _expect_endings(_play(hosted, hosted.load().examples[:1] * GROUP_SIZE, HARMLESS), GROUP_SIZE)


def plays_episodes_side_by_side(bench: Bench) -> None:
    """Groups of several tasks are played together, and `finish` gives one ending for each episode."""
    environment, examples = _sat_down(bench)
    chosen = [example for example in examples[:3] for _ in range(GROUP_SIZE)]
    _expect_endings(_play(environment, chosen, HARMLESS), len(chosen))


def asks_in_plain_data(bench: Bench) -> None:
    """What it asks is a text or a chat, and tools as JSON schemas."""
    environment, examples = _sat_down(bench)
    for asks in _play(environment, examples[:2], HARMLESS).asked:
        for number, ask in asks.items():
            expect(
                isinstance(ask, Ask) and 0 <= number < 2,
                f"advance() gave {number!r}: {ask!r:.100}",
                why="the number says whose episode waits, and an Ask what the policy is shown",
                fix="return {number of the episode: retrain.api.Ask(prompt=...)}",
            )
            try:
                json.dumps([ask.prompt, list(ask.tools)])
            except (TypeError, ValueError) as error:
                expect(
                    False,
                    f"episode {number} asks something that is no JSON: {error}",
                    why="it crosses a process boundary and goes into the chat template",
                    fix="use plain text, lists and tables in Ask.prompt and Ask.tools",
                )


def survives_hostile_replies(bench: Bench) -> None:
    """Whatever the policy says, episodes end, and their scores are sound."""
    environment, examples = _sat_down(bench)
    texts = list(HOSTILE.values())
    chosen = (list(examples) * len(texts))[: len(texts)]
    _expect_endings(_play(environment, chosen, texts, by_episode=True), len(chosen), failures=True)


def ends_when_the_context_is_full(bench: Bench) -> None:
    """An empty reply that was cut for length, over and over, leads to an end."""
    environment, examples = _sat_down(bench)
    _expect_endings(_play(environment, examples[:2], ("",), stop=StopReason.LENGTH), len(examples[:2]), failures=True)


def drops_what_was_left_open(bench: Bench) -> None:
    """`begin` in the middle of other episodes starts afresh."""
    environment, examples = _sat_down(bench)
    environment.begin([examples[0]] * 3)
    environment.advance({})
    _expect_endings(_play(environment, examples[:1], HARMLESS), 1)


def _sat_down(bench: Bench) -> tuple[Any, Sequence[Example]]:
    """The environment as another process would have it, and its tasks."""
    environment = pickle.loads(pickle.dumps(bench.build()))
    return environment, environment.load().examples


def _play(
    environment: Any,
    examples: Sequence[Example],
    texts: Sequence[str],
    *,
    by_episode: bool = False,
    stop: StopReason = StopReason.EOS,
) -> _Played:
    """Play to the end; every episode says the texts in turn, or its own text again and again."""
    played = _Played()
    environment.begin(list(examples))
    asks = environment.advance({})
    while asks:
        turn = len(played.asked)
        expect(
            turn < MAX_TURNS,
            f"{len(asks)} episodes still ask after {MAX_TURNS} turns, one of them {next(iter(asks.values()))!r:.200}",
            why="a run waits until every episode has ended",
            fix="end an episode after a number of turns, with Ending(hit_turn_limit=True)",
        )
        played.asked.append(dict(asks))
        replies = {
            number: Reply(text=texts[(number if by_episode else turn) % len(texts)], stop_reason=stop)
            for number in asks
        }
        asks = environment.advance(replies)
    played.endings = environment.finish()
    return played


def _expect_endings(played: _Played, count: int, *, failures: bool = False) -> None:
    """One sound ending per episode; a failed score only where `failures` are a fair answer."""
    expect(
        len(played.endings) == count,
        f"finish() gave {len(played.endings)} endings for {count} episodes",
        why="endings belong to episodes by their place",
        fix="return one Ending for every example that begin() was given, in that order",
    )
    for number, ending in enumerate(played.endings):
        score = verdict(ending.score) if isinstance(ending, Ending) else None
        expect(
            score is not None and (failures or score.outcome is not Outcome.FAILED),
            f"episode {number} ended with {ending!r:.300}",
            why="a failed score leaves the episode out, and a run stops when too many fail",
            fix="give Ending(score=Score.of(number)), or Score.no_verdict(reason)",
        )


ENVIRONMENT = (
    gives_tasks,
    plays_in_a_process_of_its_own,
    plays_episodes_side_by_side,
    asks_in_plain_data,
    survives_hostile_replies,
    ends_when_the_context_is_full,
    drops_what_was_left_open,
)
