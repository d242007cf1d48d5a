"""Advantages that need a greedy completion, or squared probabilities of the trainer: from declaration to credit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from retrain.advantages import AdvantageSpec, Credit, GroupStatus, Needs, TokenCredit
from retrain.api import BackendError, Completion, CreditError, Group, Score, StopReason
from retrain.credit.algorithm import CreditAlgorithm
from retrain.credit.custom import CustomAlgorithm
from retrain.credit.squared_probs import SquaredProbs
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.types import Example
from retrain.run.configure import load_with_problems
from retrain.testing import conformance

pytest.importorskip("retrain_sepa", reason="its advantages declare these needs")
pytest.importorskip("retrain_local", reason="its trainer measures squared probabilities")


@pytest.fixture(scope="module")
def installed():
    return load_plugins({})


@pytest.fixture
def loaded(installed, tmp_path):
    """`loaded(toml)`: the configuration's flow and its problems, one per line."""

    def load(text):
        (tmp_path / "retrain.toml").write_text(text, encoding="utf-8")
        _, flow, problems = load_with_problems([str(tmp_path / "retrain.toml")], installed)[:3]
        return flow, "\n".join(map(str, problems))

    return load


def toml(advantage, *, backend="local", more=""):
    algorithm = f'[algorithm]\nadvantage_mode = "{advantage}"\ntransform_mode = "none"\n'
    return f'[backend]\nbackend = "{backend}"\n{more}{algorithm}'


PRIME = 'options = { output_dir = "x" }\n'


def test_a_need_is_declared_before_anything_loads(loaded):
    flow, _ = loaded(toml("remax"))
    assert CreditAlgorithm(flow=flow).needs == Needs(greedy=True)
    flow, problems = loaded(toml("otb"))
    assert CreditAlgorithm(flow=flow).needs == Needs(squared_probs=True)
    assert problems == ""


@pytest.mark.parametrize(("backend", "more"), [("tinker", ""), ("prime_rl", PRIME)])
def test_a_backend_without_squared_probabilities_refuses_otb_by_name(loaded, backend, more):
    pytest.importorskip(f"retrain_{backend}")
    _, problems = loaded(toml("otb", backend=backend, more=more))
    assert f"'otb' needs the trainer's sums of squared probabilities, and backend '{backend}' cannot" in problems
    assert 'use advantage_mode = "grpo", or backend = "local"' in problems
    assert "squared" not in loaded(toml("remax", backend=backend, more=more))[1]


def test_a_whole_algorithm_in_its_place_has_no_such_need(loaded):
    flow, _ = loaded('[algorithm]\nadvantage_mode = "remax"\nalgorithm_mode = "grpo_none"\n')
    assert not flow.needs_greedy


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (AdvantageSpec(name="a", compute=abs, needs_greedy=True), "needs_greedy without compute_step"),
        (AdvantageSpec(name="a", compute=abs, needs_squared_probs=True), "needs_squared_probs without compute_tokens"),
    ],
)
def test_a_need_without_the_function_that_gets_it_is_refused(spec, words, monkeypatch):
    import retrain.credit.checks as checks

    with pytest.raises(Exception, match=words):
        checks.as_advantage(SimpleNamespace(target=spec, name="a", owner="test"))


@pytest.mark.parametrize("name", ["remax", "otb", "opo", "passk"])
def test_they_keep_the_contract_of_an_advantage(name):
    for check in conformance("advantage", name):
        check()


def completion(*logprobs):
    count = len(logprobs)
    return Completion(
        tokens_T=np.arange(count + 2),
        action_T=np.arange(count + 2) >= 2,
        logprobs_T=np.array([0.0, 0.0, *logprobs]),
        text="",
        stop_reason=StopReason.EOS,
        policy_version=0,
    )


def group_of(*rewards, **more):
    return Group(
        example=Example(id="e", prompt="p", reference="r"),
        completions=tuple(completion(-0.2, -1.0) for _ in rewards),
        scores=tuple(map(Score.of, rewards)),
        **more,
    )


def test_remax_trains_a_group_of_equal_rewards_that_differ_from_the_greedy_one(loaded):
    algorithm = CreditAlgorithm(flow=loaded(toml("remax"))[0])
    given = [
        group_of(1.0, 1.0, greedy_score=Score.of(0.0)),
        group_of(1.0, 1.0, greedy_score=Score.of(1.0)),
        group_of(1.0, 0.0, greedy_score=Score.no_verdict("unreadable")),
        group_of(1.0, 0.0, greedy_score=Score.of(0.25)),
    ]
    credit = algorithm.assign(0, given)
    found = [[tokens.advantages_A.tolist() for tokens in tokens_G] for tokens_G in credit.tokens_PG]
    assert found == [[[1, 1]] * 2, [[0, 0]] * 2, [[0, 0]] * 2, [[0.75, 0.75], [-0.25, -0.25]]]
    # the greedy completion is in no row, and the informative group without a baseline counts in the denominator
    assert [row.group for row in credit.rows] == [0, 0, 2, 2, 3, 3]


def test_otb_without_the_numbers_says_what_is_missing(loaded):
    algorithm = CreditAlgorithm(flow=loaded(toml("otb"))[0])
    with pytest.raises(CreditError, match="'otb' needs the trainer's squared probabilities, and there are not any"):
        algorithm.assign(0, [group_of(1.0, 0.0)])


class Squares:
    """A backend that answers with the place of each action token, as measured by the trainer."""

    def __init__(self, value=0.1):
        self.value, self.rows = value, []

    def squared_probs(self, rows, temperature):
        self.rows += rows
        assert temperature == 0.7
        return [np.where(row.action_T, self.value * np.arange(len(row.tokens_T)), 0.0) for row in rows]


def test_the_trainer_measures_all_that_may_be_trained_and_nothing_else_changes():
    given = (group_of(1.0, 0.0), group_of(0.0, 1.0, is_surplus=True))
    backend = Squares()
    shaped, fields = SquaredProbs(backend=backend, temperature=0.7).shape(0, given)
    assert fields == {}
    assert [c.squared_probs_T.tolist() for c in shaped[0].completions] == [pytest.approx([0.0, 0.0, 0.2, 0.3])] * 2
    assert shaped[1] is given[1]
    assert len(backend.rows) == 2
    assert shaped[0].scores == given[0].scores
    assert shaped[0].completions[0].tokens_T is given[0].completions[0].tokens_T
    with pytest.raises(BackendError, match="a squared probability of the trainer is not finite"):
        SquaredProbs(backend=Squares(np.nan), temperature=0.7).shape(0, given)


def test_a_context_that_was_rewritten_is_measured_by_itself():
    whole = replace(completion(-0.1, -0.2, -0.3), action_T=np.array([False, True, False, True, True]), starts=(0, 2))
    given = (replace(group_of(1.0), completions=(whole,)),)
    shaped, _ = SquaredProbs(backend=Squares(1.0), temperature=0.7).shape(0, given)
    assert shaped[0].completions[0].squared_probs_T.tolist() == [0.0, 1.0, 0.0, 1.0, 2.0]


@pytest.mark.parametrize(("loss", "is_refused"), [("gmpo", True), ("", False)])
def test_a_plugins_own_algorithm_may_not_give_gmpo_credit_by_token(loss, is_refused):
    given, credit = [group_of(1.0, 0.0)], np.array([1.0, 0.5])
    found = Credit(
        statuses_P=(GroupStatus.INFORMATIVE,),
        tokens_PG=((TokenCredit(advantages_A=credit), TokenCredit(advantages_A=credit)),),
        rows=(),
    )
    algorithm = CustomAlgorithm("mine", SimpleNamespace(assign=lambda step, groups: found), loss=loss)
    if not is_refused:
        assert algorithm.assign(0, given) is found
        return
    with pytest.raises(CreditError, match="algorithm 'mine' credits single tokens, and the loss 'gmpo' takes one"):
        algorithm.assign(0, given)
