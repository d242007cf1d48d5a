"""`[training] max_thinking_tokens` over any backend: open thoughts are closed, and the closing tag is no action."""

from types import SimpleNamespace

import numpy as np
import pytest

from retrain.kernel.config.plugin_tables import EnvironmentTable
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import TrainingTable
from retrain.kernel.contracts.context import PhaseProgress
from retrain.kernel.contracts.tasks import Prompt, Streams
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Sample, SampleRequest, SamplingParams, StopReason
from retrain.tasks.episodes import Episodes
from retrain.tasks.rollout import budget_of, draw_samples
from retrain.text.thinking import Thinking, thinking_of
from tests.kit.playing import Counting
from tests.kit.problems import refused
from tests.kit.thinking_models import CHANNELS, HARMONY, OPENED, thinking_model

WORD, SAID, ANSWER = 20, 21, 4  # tokens of a thought and of an answer, and the answer's length


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    transformers, _ = pytest.importorskip("transformers"), pytest.importorskip("retrain_local")
    return transformers.AutoTokenizer.from_pretrained(thinking_model(tmp_path_factory.mktemp("m") / "m", OPENED))


class Policy:
    """Thinks as many words as the first token of the prompt says, from the opening tag on, and answers."""

    def __init__(self, tokenizer, *, delivers_early=False, opens_after=None):
        self.tags = [tokenizer.convert_tokens_to_ids(tag) for tag in ("<think>", "</think>", "<|im_end|>")]
        self.delivers_early, self.opens_after, self.calls = delivers_early, opens_after, []

    def sample(self, requests, params, deliver=None):
        self.calls.append((requests, params))
        samples = [[self._one(request, params) for _ in request.seeds_G] for request in requests]
        if deliver is not None:
            deliver(0, 0, self._one(requests[0], params))  # another object than the one returned
        return samples

    def _one(self, request, params):
        opening, closing, end = self.tags
        row, start = list(request.prompt_T), len(request.prompt_T)
        while len(row) < start + params.max_tokens and row[-1] != end:
            if closing in row:
                row.append(end if row[::-1].index(closing) == ANSWER else SAID)
            elif opening in row:
                row.append(closing if row[::-1].index(opening) == row[0] else WORD)
            else:
                row.append(opening if len(row) == self.opens_after else WORD)
        tokens_T = np.asarray(row[start:], dtype=np.int64)
        stop = StopReason.EOS if row[-1] == end else StopReason.LENGTH
        numbers_T = -np.arange(1.0, len(tokens_T) + 1)
        return Sample(
            tokens_T=tokens_T,
            logprobs_T=numbers_T,
            stop_reason=stop,
            policy_version=7 + len(self.calls) % 2,
            entropies_T=-numbers_T if params.entropy else None,
            experts_TLK=np.zeros((len(tokens_T), 2, 1), np.int16),
        )


def drawn(policy, tokenizer, thoughts, *, budget, max_tokens=30, context_length=None, **options):
    """One completion for each number of words that the policy would think, and how often each was delivered."""
    config = Config(tables={"training": TrainingTable(max_tokens=max_tokens, max_thinking_tokens=budget)})
    limit = budget_of(config, thinking_of(config, tokenizer), context_length)
    opening = [] if policy.opens_after else [policy.tags[0]]
    requests = [SampleRequest(prompt_T=np.array([n, *opening]), seeds_G=(n,)) for n in thoughts]
    delivered, params = {}, SamplingParams(max_tokens=max_tokens, temperature=1.0, **options)

    def deliver(group, index, sample):
        delivered.setdefault((group, index), []).append(sample.tokens_T.tolist())

    samples = draw_samples(policy, requests, params, [f"e{n}" for n in thoughts], deliver, budget=limit)
    return [group[0] for group in samples], delivered


@pytest.mark.parametrize("is_early", [False, True])
def test_an_open_thought_is_closed_at_its_limit_and_the_tag_is_no_action(tokenizer, is_early):
    policy = Policy(tokenizer, delivers_early=is_early)
    _, closing, end = policy.tags
    (long, short), delivered = drawn(policy, tokenizer, (50, 3), budget=6, entropy=True)
    answer = [closing, *[SAID] * ANSWER, end]
    assert long.tokens_T.tolist() == [WORD] * 6 + answer
    assert short.tokens_T.tolist() == [WORD] * 3 + answer
    assert (long.stop_reason, long.policy_version) == (StopReason.EOS, 7)
    assert np.flatnonzero(~long.action_T).tolist() == [6]
    assert short.action_T.all(), "this one was sampled"
    assert (long.logprobs_T[6], long.entropies_T[6]) == (0.0, 0.0)
    assert long.logprobs_T.tolist() == [-1, -2, -3, -4, -5, -6, 0, -1, -2, -3, -4, -5]
    assert {at: len(tokens) for at, tokens in delivered.items()} == ({(0, 0): 1, (1, 0): 1})
    assert long.experts_TLK[:, 0, 0].tolist() == [0] * 6 + [-1] + [0] * 5, "those of a forced token are unknown"
    assert delivered[0, 0] == [long.tokens_T.tolist()]


def test_without_a_limit_there_is_one_call_and_with_one_none_more_than_rows_need(tokenizer):
    policy = Policy(tokenizer)
    ((whole,), _) = drawn(policy, tokenizer, (9,), budget=0)
    assert len(policy.calls) == 1
    assert whole.forced_T is None
    policy = Policy(tokenizer)
    ((short,), _) = drawn(policy, tokenizer, (1,), budget=8)
    assert len(policy.calls) == 1
    assert short.tokens_T.tolist() == [WORD, policy.tags[1], *[SAID] * ANSWER, policy.tags[2]]
    policy = Policy(tokenizer)
    drawn(policy, tokenizer, (50, 3, 60, 2), budget=6)
    assert len(policy.calls) == 3, "the beginnings, the rest of those closed here, the rest of the others"
    (first, _), (later, _), _ = policy.calls
    seeds = [seed for request in (*first, *later) for seed in request.seeds_G]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("opens_after", [3, 10, 19])
def test_a_thought_that_opens_late_is_limited_too(tokenizer, opens_after):
    policy = Policy(tokenizer, opens_after=opens_after)
    ((late,), _) = drawn(policy, tokenizer, (50,), budget=6, max_tokens=60)
    tokens = late.tokens_T.tolist()
    assert 0 < tokens.index(policy.tags[1]) - tokens.index(policy.tags[0]) <= 6
    assert late.stop_reason is StopReason.EOS


@pytest.mark.parametrize(("max_tokens", "context_length"), [(7, None), (30, 9), (30, 8)])
def test_without_room_for_an_answer_the_thought_stays_cut(tokenizer, max_tokens, context_length):
    ((cut,), _) = drawn(
        Policy(tokenizer), tokenizer, (50,), budget=6, max_tokens=max_tokens, context_length=context_length
    )
    assert cut.tokens_T.tolist() == [WORD] * 6
    assert (cut.stop_reason, cut.forced_T) == (StopReason.LENGTH, None)


def test_an_answer_ends_at_max_tokens_with_the_tag_counted(tokenizer):
    policy = Policy(tokenizer)
    ((cut,), _) = drawn(policy, tokenizer, (50,), budget=6, max_tokens=9)
    assert cut.tokens_T.tolist() == [WORD] * 6 + [policy.tags[1], SAID, SAID]
    assert cut.stop_reason is StopReason.LENGTH


def test_a_channel_is_closed_by_the_whole_header_of_the_answer(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(thinking_model(tmp_path / "m", HARMONY, CHANNELS))
    config = Config(tables={"training": TrainingTable(max_thinking_tokens=6)})
    budget = budget_of(config, thinking_of(config, tokenizer), None)
    assert tokenizer.decode(budget.cut_T) == "<|end|><|start|>assistant<|channel|>final<|message|>"


def test_a_limit_needs_tags_and_room_for_an_answer():
    config = Config(tables={"training": TrainingTable(max_thinking_tokens=6)})
    assert refused(budget_of, config, Thinking(tokenizer=None), None) == ["training.no-thinking-tags"]
    with pytest.raises(ValueError, match="below max_tokens"):
        TrainingTable(max_tokens=8, max_thinking_tokens=8)


class Counter:
    """Never ends a thought; after the tag that does, it says how often it has been asked before."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def sample(self, requests, params):
        return [[self._one(request, params) for _ in request.seeds_G] for request in requests]

    def _one(self, request, params):
        context = self.tokenizer.decode(request.prompt_T)
        is_closed = context.endswith("</think>")
        text = f"{context.count('And then?')}<|im_end|>" if is_closed else " hmm" * params.max_tokens
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"][: params.max_tokens]
        stop = StopReason.EOS if is_closed else StopReason.LENGTH
        numbers_T = np.full(len(ids), -0.5)
        return Sample(tokens_T=np.array(ids), logprobs_T=numbers_T, stop_reason=stop, policy_version=1)


@pytest.mark.parametrize("history", ["sampled", "rows"])
def test_each_turn_of_an_episode_has_its_limit_and_the_environment_sees_answers(tokenizer, history):
    training = TrainingTable(max_tokens=20, max_thinking_tokens=5)
    config = Config(tables={"training": training, "environment": EnvironmentTable(history=history)})
    context = SimpleNamespace(tokenizer=tokenizer, config=config, sampling_progress=PhaseProgress())
    environment, params = Counting(turns=2), SamplingParams(max_tokens=20, temperature=1.0)
    prompts = [Prompt(example=each, tokens_T=np.arange(3)) for each in environment.load().examples[:1]]
    with Episodes(Counter(tokenizer), context, environment, params).batch("step_0") as batch:
        ((first, second),) = batch.sample(prompts, 2, Streams(seeds=Seeds(1), purpose="sample"))
        assert [score.value for score in batch.scores()[0]] == [1.0, 1.0]
    assert environment.said == {0: ["0", "1"], 1: ["0", "1", "2"]}
    for completion, turns in ((first, 2), (second, 3)):
        closing = tokenizer.convert_tokens_to_ids("</think>")
        assert closing not in completion.tokens_T[completion.action_T]
        assert (completion.answer, len(completion.reasoning.split("\n\n"))) == (str(turns - 1), turns)
        assert len(completion.contexts) == (1 if history == "sampled" else turns)
        seen = tokenizer.decode(completion.tokens_T[completion.contexts[-1]])
        assert seen.count("</think>") == (turns if history == "sampled" else 1)
