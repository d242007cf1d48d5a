"""What a transform is given that asks for text or for rewards of single tokens, and that nobody else pays for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from retrain.advantages import compute_composable_advantages
from retrain.credit.algorithm import CreditAlgorithm
from retrain.credit.flow import CreditFlow
from retrain.credit.specs import AlgorithmSpec, TransformContext, TransformSpec
from retrain.inspect.credit_command import replay
from retrain.kernel.contracts.algorithm import Needs
from retrain.kernel.errors import ConfigError
from retrain.kernel.types import Group
from retrain.records.run import StoredStep
from retrain.testing import conformance
from retrain.testing.toys import scored_groups
from tests.kit.credit_parts import make_credit_group, make_flow

WORDS = {1: "\\bo", 2: "xed{4", 3: "2}", 4: " so", 5: "é"}


class Tokenizer:
    """Decodes a word per id; an id outside its vocabulary is an error."""

    def decode(self, tokens: Any, **_: Any) -> str:
        return "".join(WORDS[int(token)] for token in tokens)


def group_of(*ids_G: list[int]) -> Group:
    """A group with these sampled tokens and rewards 1, 0, 1, ..."""
    rewards = [float(number % 2 == 0) for number in range(len(ids_G))]
    (group,) = scored_groups([make_credit_group(rewards, [[-1.0] * len(ids) for ids in ids_G])])
    pairs = zip(group.completions, ids_G, strict=True)
    completions = tuple(replace(c, tokens_T=np.array([9, 9, *ids], dtype=np.int64)) for c, ids in pairs)
    return replace(group, completions=completions)


def seen_by(flow: CreditFlow, group: Group, tokenizer: Any) -> list[TransformContext]:
    seen: list[TransformContext] = []

    def credit(ctx: TransformContext) -> Any:
        seen.append(ctx)
        return [np.zeros(len(lp)) for lp in ctx.logprobs_G]

    if flow.algorithm:
        flow = replace(flow, algorithm=replace(flow.algorithm, compute_context=credit))
    else:
        flow = replace(flow, transform=replace(flow.transform, compute_context=credit))
    CreditAlgorithm(flow=flow, tokenizer=tokenizer).assign(0, [group])
    return seen


@pytest.mark.parametrize("spec", [TransformSpec, AlgorithmSpec])
def test_a_part_that_asks_sees_the_sampled_tokens_and_their_texts(spec: Any) -> None:
    part = spec(name="t", needs_text=True)
    flow = make_flow(**({"transform": part} if spec is TransformSpec else {"algorithm": part}))
    (ctx,) = seen_by(flow, group_of([1, 2, 3], [4]), Tokenizer())
    assert ctx.tokens_G is not None
    assert [tokens.tolist() for tokens in ctx.tokens_G] == [[1, 2, 3], [4]]  # the prompt's are not among them
    assert ctx.texts_G == [["\\bo", "xed{4", "2}"], [" so"]]
    assert ctx.token_rewards_G is None


def test_nothing_is_decoded_unless_a_part_asks() -> None:
    (ctx,) = seen_by(make_flow(), group_of([1], [2]), None)
    assert (ctx.tokens_G, ctx.texts_G, ctx.token_rewards_G) == (None, None, None)


def test_rewards_of_single_tokens_reach_a_part_that_asks() -> None:
    group = group_of([1, 2], [3])
    first = replace(group.completions[0], rewards_T=np.array([7.0, 7.0, 0.5, -0.25]))
    flow = make_flow(transform=TransformSpec(name="t", needs_token_rewards=True))
    (ctx,) = seen_by(flow, replace(group, completions=(first, group.completions[1])), None)
    assert ctx.token_rewards_G is not None
    assert [rewards.tolist() for rewards in ctx.token_rewards_G] == [[0.5, -0.25], [0.0]]
    assert ctx.texts_G is None
    assert CreditAlgorithm(flow=flow).needs == Needs(token_rewards=True)  # for the part that sets them
    with pytest.raises(ConfigError, match="takes rewards of single tokens: a run does not store them"):
        replay(StoredStep(step=3, metrics={}, groups=()), flow, None, sepa_lambda=0.0)


DIGITS = """
import numpy as np

from retrain.advantages import TransformOutput, TransformSpec
from retrain.api import PluginSpec


def weights(texts):
    weights_T = np.where([any(map(str.isdigit, text)) for text in texts], 4.0, 1.0)
    return weights_T / weights_T.mean() if texts else weights_T


def credit(ctx):
    pairs = zip(ctx.advantages_G, ctx.texts_G, strict=True)
    return TransformOutput(token_advs=[advantage * weights(texts) for advantage, texts in pairs])


SPEC = TransformSpec(name="digits", compute_context=credit, needs_text=True)
PLUGIN = PluginSpec(name="digits", summary="Four times the credit for tokens with a digit.", factory=SPEC)
"""


def test_a_transform_that_reads_the_text_conforms_and_credits_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "credit_for_digits.py").write_text(DIGITS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    checks = conformance("transform", "credit_for_digits.PLUGIN")
    assert len(checks) > 5
    for check in checks:
        check()
    texts = ["The", " answer", " is", " \\bo", "xed{4", "2", "", "}", "."]
    result = compute_composable_advantages(
        [1.0, 0.0],
        [[-1.0] * len(texts), [-1.0, -1.0]],
        advantage_mode="grpo",
        transform_mode="credit_for_digits.PLUGIN",
        texts_G=[texts, ["no", " answer"]],
    )
    expected = np.array([1, 1, 1, 1, 4, 4, 1, 1, 1]) / 15 * 9 * 0.5
    assert_allclose(result.token_advs[0], expected)
    assert_array_equal(result.token_advs[1], [-0.5, -0.5])
