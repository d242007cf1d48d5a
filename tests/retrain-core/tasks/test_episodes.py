"""Episodes turn by turn; rewards and environments are one thing to whoever uses a verifier."""

import os
import subprocess
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from retrain.credit.algorithm import CreditAlgorithm
from retrain.kernel import types
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.contracts.context import PhaseProgress, PluginContext
from retrain.kernel.contracts.tasks import (
    Action,
    EpisodeResult,
    Prompt,
    Streams,
)
from retrain.kernel.errors import BackendError, ConfigError, NonFiniteError, Problem, RewardError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Outcome, SamplingParams, StopReason
from retrain.observe.metrics.evaluate import eval_metrics
from retrain.tasks.environment import EnvironmentProcess, EnvironmentVerifier
from retrain.tasks.episodes import Episodes
from retrain.tasks.scoring.pool import NamedReward
from retrain.tasks.scoring.service import ScoringService
from retrain.tasks.tasks import RewardVerifier
from tests.kit.playing import Counting
from tests.kit.problems import codes_in

PARAMS = types.SamplingParams(max_tokens=8, temperature=1.0, entropy=True)


@pytest.fixture(scope="module")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    local = pytest.importorskip("retrain_local")
    return transformers.AutoTokenizer.from_pretrained(Path(local.__file__).parent / "tiny")


@dataclass
class Scripted:
    """A backend that answers from a script: `words(number of the call, the context as text)`."""

    tokenizer: Any
    words: Callable[[int, str], str]
    calls: list[list[types.SampleRequest]] = field(default_factory=list)
    spoilt: bool = False

    def sample(self, requests, params):
        self.calls.append(list(requests))
        return [[self._say(request) for _ in request.seeds_G] for request in requests]

    def _say(self, request):
        text = self.words(len(self.calls) - 1, self.tokenizer.decode(request.prompt_T))
        ids = np.array(self.tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"])
        return types.Sample(
            tokens_T=ids,
            logprobs_T=np.full(len(ids), np.nan if self.spoilt else -0.25),
            entropies_T=np.full(len(ids), 0.5),
            stop_reason=types.StopReason.EOS,
            policy_version=7,
        )


def prompts(environment, tokenizer):
    return [
        Prompt(example=e, tokens_T=np.array(tokenizer.apply_chat_template(list(e.prompt))["input_ids"]))
        for e in environment.load().examples
    ]


def context_of(tokenizer, config, progress=None):
    """What a run's parts are built with, as far as episodes use it."""
    return SimpleNamespace(tokenizer=tokenizer, config=config, sampling_progress=progress or PhaseProgress())


def play(environment, backend, *, group_size=2, context_length=None, **more):
    context = context_of(backend.tokenizer, Config(tables={}), **more)
    owner = Episodes(backend, context, environment, PARAMS, context_length)
    with owner.batch("step_0") as batch:
        streams = Streams(seeds=Seeds(1), purpose="sample")
        return batch.sample(prompts(environment, backend.tokenizer), group_size, streams), batch


def actions(backend, completion):
    return str(backend.tokenizer.decode(completion.tokens_T[completion.action_T]))


def test_a_completion_knows_its_turns(tokenizer):
    backend = Scripted(tokenizer, lambda call, context: str(call))
    groups, _ = play(Counting(turns=2, pays_turns=True), backend)
    turns = groups[0][1].by_turn
    size = len(tokenizer("0<|im_end|>", add_special_tokens=False)["input_ids"])
    assert turns == types.Turns(
        lengths=(size,) * 3, rewards=(1 / 3, 1 / 3, 1 / 3), states=("word 1", "word 2", "word 3")
    )
    groups, _ = play(Counting(turns=2), backend)
    first, second = (completion.by_turn for completion in groups[1])
    assert first.states[0] == second.states[0] != groups[0][0].by_turn.states[0], "the opening, by its text"
    assert first.states[1] == groups[0][0].by_turn.states[1], "the same words after another action"
    assert first.rewards == ()


def test_a_reward_of_a_turn_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="finite"):
        EpisodeResult(turn_rewards=(0.0, float("nan")))


def test_all_that_wait_are_sampled_together_each_turn(tokenizer):
    backend = Scripted(tokenizer, lambda call, context: str(call))
    groups, batch = play(Counting(turns=2), backend)
    assert [len(group) for group in groups] == [2, 2, 2]
    second = backend.calls[1][0].prompt_T  # the context that the policy was given before, and its words
    assert groups[0][0].tokens_T[: len(second)].tolist() == second.tolist()
    assert tokenizer.decode(second).endswith("And then?<|im_end|>\n<|im_start|>assistant\n")
    assert [sum(len(r.seeds_G) for r in call) for call in backend.calls] == [6, 6, 3], (
        "every second one has a third turn"
    )
    assert len(backend.calls[0]) == 3, "a group shares its opening"
    seeds = [seed for call in backend.calls for request in call for seed in request.seeds_G]
    assert len(set(seeds)) == len(seeds)
    for group in groups:
        for number, completion in enumerate(group):
            turns = 2 + number % 2
            assert completion.turns == turns
            assert actions(backend, completion) == "".join(f"{turn}<|im_end|>" for turn in range(turns))
            assert completion.starts == (0,)
            assert completion.policy_version == 7
            assert (completion.logprobs_T[completion.action_T] == -0.25).all()
            assert not completion.logprobs_T[~completion.action_T].any()
            assert completion.entropies_T is not None
            assert "And then?" in completion.text
    assert groups[0][0].stop_reason is types.StopReason.TURNS
    assert groups[1][0].stop_reason is types.StopReason.EOS
    scores = batch.scores()
    assert [score.value for score in scores[0]] == [1.0, 1.0]
    assert batch.metrics()["turns_mean"] == 2.5
    assert batch.metrics()["rewritten_history_count"] == 0


@pytest.mark.parametrize("early", [True, False])
def test_each_turn_says_how_many_episodes_have_ended(tokenizer, early):
    class Delivering(Scripted):
        delivers_early = early

        def sample(self, requests, params, deliver=None):
            assert (deliver is not None) is early
            found = super().sample(requests, params)
            if deliver is not None:
                deliver(0, 0, found[0][0])  # the others come at the end
            seen.append((progress.done, progress.total, progress.tokens))
            return found

    seen = []
    progress = PhaseProgress()
    groups, _ = play(Counting(turns=2), Delivering(tokenizer, lambda call, context: str(call)), progress=progress)
    length = len(tokenizer("0<|im_end|>")["input_ids"])
    assert seen == [(0, 6, early * length), (0, 6, (6 + early) * length), (3, 6, (12 + early) * length)]
    assert (progress.done, progress.tokens) == (6, sum(int(c.action_T.sum()) for group in groups for c in group))


def test_a_rewritten_history_is_trained_as_rows_of_its_own(tokenizer):
    backend = Scripted(tokenizer, lambda call, context: "one" if call else "zero")
    groups, batch = play(Counting(turns=2, rewrites=True), backend, group_size=2)
    completion = groups[1][0]
    assert len(completion.starts) == 2
    assert batch.metrics()["rewritten_history_count"] == 9
    seen = tokenizer.decode(completion.tokens_T[completion.starts[1] :])
    assert "..." in seen
    assert "zero" not in seen
    rows = rows_of(groups[1], tokenizer)
    assert len(rows) == 2 + 3
    assert [int(row.action_T.sum()) for row in rows[:2]] == [
        len(tokenizer(f"{word}<|im_end|>", add_special_tokens=False)["input_ids"]) for word in ("zero", "one")
    ]
    for row in rows:
        assert (row.advantages_T[row.action_T] != 0).all()
        assert not row.advantages_T[~row.action_T].any()
        assert not row.action_T[0]


def rows_of(group, tokenizer):
    from retrain.credit.flow import build_flow
    from retrain.kernel.plugins.discover import load_plugins
    from retrain.run.configure import load_checked

    plugins = load_plugins()
    checked = load_checked(["--advantage-mode", "grpo", "--transform-mode", "none"], plugins)
    scores = tuple(types.Score.of(float(number)) for number in range(len(group)))
    example = Counting().load().examples[0]
    groups = (types.Group(example=example, completions=group, scores=scores),)
    flow = build_flow(checked.config, plugins)
    return CreditAlgorithm(flow=flow).assign(0, groups).rows


def test_an_episode_whose_context_is_full_gets_one_empty_action_and_no_more(tokenizer):
    environment = Counting(turns=50)
    backend = Scripted(tokenizer, lambda call, context: "x")
    groups, _ = play(environment, backend, context_length=120)
    for group in groups:
        for completion in group:
            assert completion.stop_reason in (types.StopReason.LENGTH, types.StopReason.TURNS)
            assert len(completion.tokens_T) <= 120
            assert 1 < completion.turns < 50
    assert all(stops[-1] == "length" and stops.count("length") == 1 for stops in environment.stops.values())


def test_results_that_are_missing_and_failures_past_the_budget_are_errors(tokenizer):
    backend = Scripted(tokenizer, lambda call, context: "1")
    with pytest.raises(BackendError, match="5 results for 6 episodes"):
        play(Counting(fault="forgets one"), backend)

    class Failing(Counting):
        def results(self):
            return [EpisodeResult(score=types.Score.failed("KeyError: 'x'")) for _ in super().results()]

    _, batch = play(Failing(), backend)
    with pytest.raises(RewardError, match="failed on 6 of 6 episodes; first: KeyError"):
        batch.scores()
    with pytest.raises(NonFiniteError, match="example count-0"):
        play(Counting(), Scripted(tokenizer, lambda call, context: "1", spoilt=True))

    class Measuring(Counting):
        def results(self):
            parts = [{"tool_calls": float(number)} if number % 2 else {} for number in range(6)]
            given = zip(super().results(), parts, strict=True)
            return [replace(result, score=replace(result.score, parts=part)) for result, part in given]

    _, batch = play(Measuring(turns=2), Scripted(tokenizer, lambda call, context: str(call)))
    assert batch.metrics()["reward_tool_calls_mean"] == 3.0
    assert eval_metrics(batch.scores())["eval_reward_tool_calls_mean"] == 3.0

    class Late(Counting):
        def _observations(self):
            return {number: seen for number, seen in super()._observations().items() if number != 1}

        def results(self):
            found = super().results()
            found[1] = EpisodeResult(score=types.Score.failed("OSError: no tools"))
            return found

    groups, batch = play(Late(), Scripted(tokenizer, lambda call, context: "1"))
    lost, played = groups[0][1], groups[0][0]
    assert tokenizer.decode(lost.tokens_T).startswith(tokenizer.decode(played.tokens_T[: len(lost.tokens_T)]))
    assert len(lost.tokens_T) == len(lost.action_T) > 0
    assert not lost.action_T.any()
    assert (lost.text, lost.turns) == ("", 0)
    with pytest.raises(RewardError, match="failed on 1 of 6 episodes; first: OSError"):
        batch.scores()


class Answering(Counting):
    """Plays the tasks of `[data]`: the last action is the answer, and the first episode breaks."""

    def results(self):
        broken = EpisodeResult(score=types.Score.failed("the tool broke"))
        return [EpisodeResult(answer=said[-1]) if n else broken for n, said in self.said.items()]


class Said:
    """1 for the answer "yes", and no score of another than these two."""

    def score(self, example, text):
        return {"yes": 1.0, "no": 0.0}[text]


def judged(tokenizer, tmp_path, words, max_failed_frac):
    """Scores by group, and metrics, of a batch in which rewards judge the answers."""
    settings = ScoringTable(workers=1, memory_gb=4.0, retries=0, max_failed_frac=max_failed_frac)
    backend, environment = Scripted(tokenizer, words), Answering(turns=1)
    with ScoringService([NamedReward(name="said", reward=Said(), weight=2.0)], settings) as service:
        context = context_of(tokenizer, Config(tables={"scoring": settings}))
        owner = Episodes(backend, context, environment, PARAMS, scoring=service)
        with owner.batch("step_0", tmp_path) as batch:
            batch.sample(prompts(environment, tokenizer), 2, Streams(seeds=Seeds(1), purpose="sample"))
            return [list(group) for group in batch.scores()], batch.metrics()


def test_the_rewards_of_a_run_judge_the_answers_of_its_episodes(tokenizer, tmp_path):
    def words(call, context):
        return "yes" if "from 1" in context else "perhaps" if "from 2" in context else "no"

    scores, metrics = judged(tokenizer, tmp_path, words, 0.4)
    assert scores[0] == [types.Score.failed("the tool broke"), types.Score.of(0.0)]
    assert scores[1] == [types.Score.of(2.0)] * 2, "with the reward's weight"
    assert [score.outcome for score in scores[2]] == [types.Outcome.FAILED] * 2
    assert metrics["turns_mean"] == 1.5
    assert "score_mean_time_s" in metrics
    assert list(tmp_path.glob("step_0_*.json")), "what a reward cannot score is kept"
    with pytest.raises(RewardError, match="the environment failed on 1 of 6 episodes; first: the tool broke"):
        judged(tokenizer, tmp_path, lambda call, context: "no", 0.1)


REFUSED = ConfigError(Problem(code="a.b", where="[environment] id", what="is for evaluation", fix="take another"))


class Refusing(Counting):
    def load(self):
        raise REFUSED


class Dying(Counting):
    def load(self):
        os._exit(3)


class Serving(Counting):
    """Starts a process in `load` and in each `reset`; an observation tells which of them are alive."""

    def load(self):
        self.servers = [subprocess.Popen(["sleep", "60"])]
        return super().load()

    def reset(self, examples):
        self.servers.append(subprocess.Popen(["sleep", "60"]))
        return super().reset(examples)

    def _messages(self, number):
        alive = [server.poll() is None for server in self.servers]
        return [{"role": "user", "content": str(alive)}]


def said(text):
    return Action(text=text, stop_reason=StopReason.EOS)


@pytest.fixture
def host():
    hosted = []

    def make(environment, timeout_s=20.0):
        made = EnvironmentProcess(environment, name="counting", timeout_s=timeout_s, memory_gb=4.0)
        hosted.append(made)
        return made

    yield make
    for each in hosted:
        each.close()
        each.close()


def test_episodes_are_played_in_another_process(host):
    environment = Counting()
    hosted = host(environment)
    data = hosted.load()
    assert [example.id for example in data.examples] == ["count-0", "count-1", "count-2"]
    assert data.notes == ("counting: 3 tasks",)
    observations = hosted.reset([data.examples[1], data.examples[1]])
    assert sorted(observations) == [0, 1]
    assert observations[0].prompt[-1]["content"] == "Count from 1."
    assert sorted(hosted.step({0: said("1"), 1: said("no")})) == [0, 1]
    assert sorted(hosted.step({0: said("2"), 1: said("2")})) == [1]
    assert hosted.step({1: said("3")}) == {}
    assert [result.score.value for result in hosted.results()] == [1.0, 2 / 3]
    assert environment.said == {}, "nothing happened here"


def test_what_load_refuses_arrives_whole_and_a_process_that_dies_while_loading_is_an_error(host):
    with pytest.raises(ConfigError) as refused:
        host(Refusing()).load()
    assert refused.value.problems == REFUSED.problems
    with pytest.raises(RewardError) as caught:
        host(Dying()).load()
    assert codes_in(caught) == ["environment.cannot-load"]
    hosted = host(Serving())
    example = hosted.load().examples[0]
    assert hosted.reset([example])[0].prompt[0]["content"] == "[True, True]"
    assert hosted.reset([example])[0].prompt[0]["content"] == "[True, False, True]"


@pytest.mark.parametrize("fault", ["dies", "hangs", "raises"])
def test_lost_episodes_end_as_failed_and_the_next_ones_are_played(host, fault, monkeypatch):
    monkeypatch.setattr("retrain.tasks.environment.GRACE_S", 0.5 if fault == "hangs" else 20.0)
    hosted = host(Counting(fault=fault), timeout_s=0.0)
    data = hosted.load()
    observations = hosted.reset(list(data.examples))
    assert hosted.step({number: said("0") for number in observations}) == {}
    results = hosted.results()
    assert [result.score.outcome for result in results] == [Outcome.FAILED] * 3
    assert "'counting' failed in step" in results[0].score.detail
    assert sorted(hosted.reset(list(data.examples[:2]))) == [0, 1]


class Length:
    """A text's length; it cannot score "boom"."""

    def score(self, example, text):
        if text == "boom":
            raise ValueError(text)
        return float(len(text))


def check(verifier, pairs):
    """Start, make rollouts and score; everything may be called twice."""
    context = PluginContext(config=Config(tables={}), seeds=Seeds(0), plugins=load_plugins({}))
    backend = object()  # nothing is sampled here
    with closing(verifier):
        verifier.start()
        verifier.start()
        rollouts = verifier.rollouts(backend, context, SamplingParams(max_tokens=8, temperature=1.0), 100)
        with rollouts.batch("step_0") as batch:
            assert batch.metrics() is not None
        rollouts.close()
        rollouts.close()
        found = list(verifier.score_texts(pairs))
        verifier.close()
    return found


def test_rewards_score_each_text_as_a_completion_and_an_environment_plays_an_episode_of_each():
    settings = ScoringTable(workers=1, memory_gb=4.0, retries=0, timeout_s=7.0)
    rewards = RewardVerifier(ScoringService([NamedReward(name="length", reward=Length())], settings))
    assert (rewards.names, rewards.timeout_s) == (("length",), 7.0)
    assert isinstance(rewards.rewards[0], Length)
    example = Example(id="e", prompt="p", reference="1")
    found = check(rewards, [(example, "four"), (example, "four"), (example, "boom")])
    assert [each.score.value for each in found] == [4.0, 4.0, None]
    assert found[2].score.outcome is Outcome.FAILED, "a failed score is returned, however many there are"
    assert all(each.seconds > 0.0 for each in found), "equal texts are scored again, not looked up"

    environment = EnvironmentProcess(Counting(), name="counting", timeout_s=20.0, memory_gb=4.0)
    environment.load()
    plays = EnvironmentVerifier(environment)
    assert (plays.names, plays.rewards, plays.timeout_s) == (("counting",), (), None)
    zero, one, _ = Counting().load().examples
    found = check(plays, [(zero, "0"), (one, "2")])
    assert [each.score.value for each in found] == [0.5, 1 / 3]  # of two turns, and of three
