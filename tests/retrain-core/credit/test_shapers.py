"""Shapers of a run: the KL and a teacher, and what tables they refuse; whole runs that measure the KL."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from retrain import api
from retrain.credit.algorithm import train_rows
from retrain.credit.kl import k1, k3, shaper_of, steered
from retrain.credit.teacher import TeacherShaper, open_teacher
from retrain.kernel.config import schema
from retrain.kernel.config.plugin_tables import KlTable, TeacherTable
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import TrainingTable
from retrain.kernel.contracts.views import GroupsView
from retrain.kernel.types import GroupStatus, group_status, num_correct
from tests.kit.credit_parts import completion, group
from tests.kit.overlapped import outcome
from tests.kit.problems import codes_in, refused

LOGPROBS, REFERENCE = np.array([-1.0, -0.5, -2.0]), np.array([-0.8, -0.9, -2.0])
REPORT: Any = SimpleNamespace()


@dataclass
class Backend:
    """A backend whose reference gives each token of a row the same log-probability, or one of its own by id."""

    by_token: dict[int, float] = field(default_factory=dict)
    regularisers: frozenset[str] = frozenset({"kl_reward", "kl_loss", "kl_log"})
    asked: list[int] = field(default_factory=list)

    @property
    def capabilities(self):
        return SimpleNamespace(regularisers=self.regularisers)

    def reference_logprobs(self, rows, temperature):
        assert temperature == 0.7
        self.asked.append(len(rows))
        found = []
        for row in rows:
            of_row = np.array([self.by_token.get(int(token), -1.0) for token in row.tokens_T])
            found.append(np.where(row.action_T, of_row, 0.0))
        return found


@pytest.fixture
def backend():
    return Backend(by_token=dict(enumerate(REFERENCE)))


@pytest.fixture
def pair():
    """Two completions of tokens 0, 1, 2: one as in the documented vectors, one on the reference."""
    near = completion([99, 0, 1, 2], REFERENCE.tolist())
    return group(completion([99, 0, 1, 2], LOGPROBS.tolist()), near, scores=(1.0, 0.0))


def shapers(backend, by_token=False, **keys):
    tables = {"kl": KlTable(**keys), "training": TrainingTable(temperature=0.7)}
    origins = {f"kl.{name}": object() for name in keys}
    return shaper_of(Config(tables=tables, origins=origins), backend, by_token=by_token)


def shaper(backend, **keys):
    (made,) = shapers(backend, **keys)
    return made


def test_in_the_reward_a_completion_loses_the_sum_of_k1(backend, pair):
    (shaped,), fields = shaper(backend, coef=0.5, where="reward").shape(3, [pair])
    assert [score.value for score in shaped.scores] == pytest.approx([1.0 - 0.5 * 0.2, 0.0])
    assert fields == pytest.approx(
        {"kl_mean": (0.021403 + 0.07032) / 6, "kl_k1_mean": 0.2 / 6, "kl_coef": 0.5, "kl_penalty_mean": 0.05}, abs=1e-6
    )
    assert num_correct(shaped) == 1
    tied = group(*pair.completions, scores=(1.0, 1.0))
    (shaped,), _ = shaper(backend, coef=0.5, where="reward").shape(3, [tied])
    assert shaped.scores[0].value != shaped.scores[1].value
    assert group_status(shaped) is GroupStatus.ALL_RIGHT, "a penalty does not make a group informative"
    assert all(c.reference_logprobs_T is None for c in shaped.completions)
    earned = replace(pair.completions[0], rewards_T=np.array([0.0, 1.0, 0.0, 0.0]))
    given = replace(pair, completions=(earned, *pair.completions[1:]))
    (shaped,), fields = shapers(backend, by_token=True, coef=0.5, where="reward")[0].shape(3, [given])
    assert shaped.scores == pair.scores, "credit that takes rewards of single tokens gets those"
    assert shaped.completions[0].rewards_T == pytest.approx(np.array([0.0, 1.1, -0.2, 0.0]))
    assert earned.rewards_T.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert fields["kl_penalty_mean"] == pytest.approx(0.05)


def test_the_loss_is_given_reference_and_coefficient_and_rewards_stay(backend, pair):
    (shaped,), fields = shaper(backend, coef=0.5).shape(3, [pair])
    assert shaped.scores == pair.scores
    assert "kl_penalty_mean" not in fields
    (row,) = train_rows(shaped.completions[0], np.ones(3))
    assert row.kl_coef == 0.5
    assert row.reference_logprobs_T is not None
    assert row.reference_logprobs_T.tolist() == [0.0, *REFERENCE]
    episode = completion([99, 0, 99, 1, 2], LOGPROBS.tolist(), starts=(0, 2))
    backend.asked.clear()
    (shaped,), _ = shaper(backend, coef=1.0).shape(0, [group(episode, scores=(1.0,))])
    assert backend.asked == [2], "every context of an episode is a row"
    references = [row.reference_logprobs_T for row in train_rows(shaped.completions[0], np.ones(3))]
    assert np.concatenate(references).tolist() == [0.0, REFERENCE[0], 0.0, *REFERENCE[1:]]
    with pytest.raises(api.BackendError, match=r"reference is not finite .*\[model.not-finite\]"):
        shaper(Backend(by_token={1: -np.inf}), coef=1.0, where="reward").shape(0, [pair])


def test_a_completion_without_a_verdict_is_left_alone(backend, pair):
    undecided = group(*pair.completions, scores=(api.Score.no_verdict("?"), 1.0))
    (shaped,), fields = shaper(backend, coef=0.5, where="reward").shape(3, [undecided])
    assert shaped.scores[0].outcome is api.Outcome.NO_VERDICT
    assert (backend.asked, fields["kl_mean"]) == ([1], 0.0)
    nothing = group(*pair.completions, scores=(api.Score.no_verdict("?"), api.Score.failed("!")))
    _, fields = shaper(backend, coef=0.5).shape(3, [nothing])
    assert fields == {"kl_coef": 0.5}
    backend.asked.clear()
    others = tuple(map(replace, pair.completions))
    groups = (pair, replace(pair, completions=others, is_surplus=True))
    shaped, fields = shaper(backend, coef=0.5).shape(3, groups)
    assert (backend.asked, fields["kl_mean"]) == ([2], pytest.approx((0.021403 + 0.07032) / 6, abs=1e-6))
    assert [c.kl_coef for each in shaped for c in each.completions] == [0.5, 0.5, 0.0, 0.0]
    shaper(backend).retrain_extra_metrics(GroupsView(step=3, groups=groups[1:]), REPORT)
    assert backend.asked == [2]
    shaped, _ = shaper(backend, coef=0.5, where="reward").shape(3, groups)
    assert backend.asked == [2, 4]
    assert [each.scores[0].value for each in shaped] == pytest.approx([0.9, 0.9])


def test_without_a_coefficient_a_sixteenth_is_measured_after_the_step(backend, pair):
    groups = tuple(group(*[pair.completions[0]] * 8, scores=[1.0] * 8) for _ in range(4))
    made = shaper(backend)
    assert made.shape(0, groups) == (groups, {})
    assert backend.asked == []
    fields = made.retrain_extra_metrics(GroupsView(step=0, groups=groups), REPORT)
    assert backend.asked == [2]
    assert fields == pytest.approx({"kl_mean": (0.021403 + 0.07032) / 3, "kl_k1_mean": 0.2 / 3}, abs=1e-6)
    assert made.retrain_extra_metrics(GroupsView(step=0, groups=groups), None) == {}
    assert k1(REFERENCE - LOGPROBS) == pytest.approx([-0.2, 0.4, 0.0])
    assert k3(REFERENCE - LOGPROBS) == pytest.approx([0.021403, 0.07032, 0.0], abs=1e-6)
    assert k3(np.array([1e4, -1e4])) == pytest.approx([np.exp(20) - 21, 19.0], rel=1e-6)


def test_a_resumed_run_measures_where_the_run_did_although_its_file_now_holds_every_key(pair):
    """A run's own config.toml writes `log = true` out, which asks for nothing."""
    step = GroupsView(step=0, groups=(pair,))
    dear = Backend(by_token=dict(enumerate(REFERENCE)), regularisers=frozenset({"kl_reward"}))
    asked = shaper(dear, log=True)
    assert asked.retrain_extra_metrics(step, REPORT)
    for state, measures in (({}, False), (asked.retrain_save_state(), True)):
        resumed = shaper(dear, log=True)
        resumed.retrain_load_state(state)
        assert bool(resumed.retrain_extra_metrics(step, REPORT)) == measures
        assert resumed.retrain_save_state() == state
    assert shaper(Backend(by_token=dict(enumerate(REFERENCE)))).retrain_save_state() == {}
    assert shapers(Backend(), log=False) == shapers(dear) == shapers(Backend(regularisers=frozenset()), log=True) == []


@pytest.mark.parametrize(("kl", "expected"), [(0.11, 0.1 * 1.01), (10.0, 0.1 * 1.02), (0.0, 0.1 * 0.98)])
def test_a_steered_coefficient_moves_by_a_fifth_in_its_horizon(kl, expected):
    assert steered(0.1, kl, target=0.1, count=10, horizon=100) == pytest.approx(expected)


def test_the_coefficient_moves_once_per_finished_step_and_resumes(backend, pair):
    made, view = shaper(backend, coef=0.1, target=1.0, horizon=10), GroupsView(step=0, groups=(pair,))
    for _ in range(2):  # the second time because memory ran out
        assert made.shape(0, [pair])[1]["kl_coef"] == 0.1
    assert made.retrain_extra_metrics(view, REPORT) == {}
    state = made.retrain_save_state()
    resumed = shaper(backend, coef=0.1, target=1.0, horizon=10)
    resumed.retrain_load_state(state)
    for each in (made, resumed):
        assert each.shape(1, [pair])[1]["kl_coef"] == 0.1 * (1.0 - 0.2 * 2 / 10)
    with pytest.raises(api.ResumeError, match="no-kl-coef"):
        resumed.retrain_load_state({})
    fixed = shaper(backend, coef=0.1)
    assert fixed.retrain_save_state() == {}
    fixed.retrain_load_state({})


@dataclass
class Toy:
    """A teacher for whom token n has log-probability -n / 10."""

    asked: list[list[int]] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)
    wrong: float | None = None
    is_closed: bool = False

    def logprobs(self, rows, temperature):
        assert temperature == 0.7
        self.asked += [row.tokens_T.tolist() for row in rows]
        found = [np.where(row.action_T, -row.tokens_T / 10, 0.0) for row in rows]
        if self.wrong is not None:
            found[0][-1] = self.wrong
        return found

    def state(self):
        return self.limits

    def restore(self, state):
        self.limits = {name: int(value) for name, value in state.items()}

    def close(self):
        self.is_closed = True


def test_every_completion_gets_the_difference_as_rewards_of_its_tokens():
    toy = Toy()
    before = np.array([0.0, 1.0, 0.0, 0.0])
    judged = completion([99, 1, 2, 3], [-0.2, -0.2, -0.2], rewards_T=before)
    others = [completion([99, 99, 5], [-0.9]), completion([99, 4], [-0.4])]
    scores = [api.Score.of(1.0), api.Score.no_verdict("?"), api.Score.failed("!")]
    groups = (group(judged, *others, scores=scores), group(completion([99, 10], [-0.5]), scores=scores[:1]))
    shaped, fields = TeacherShaper(toy, 0.7).shape(0, groups)
    rewards = [c.rewards_T.tolist() for each in shaped for c in each.completions if c.rewards_T is not None]
    for got, wanted in zip(rewards, [[0, 1.1, 0.0, -0.1], [0, 0, 0.4], [0, 0.0], [0, -0.5]], strict=True):
        assert_allclose(got, wanted, atol=1e-12)
    d_A = np.array([0.1, 0.0, -0.1, 0.4, 0.0, -0.5])
    assert fields["teacher_kl_k1_mean"] == pytest.approx(-d_A.mean())
    assert fields["teacher_kl_mean"] == pytest.approx((np.exp(d_A) - 1 - d_A).mean())
    assert fields["teacher_time_s"] >= 0.0
    assert [each.scores for each in shaped] == [each.scores for each in groups]
    assert before.tolist() == [0.0, 1.0, 0.0, 0.0]
    toy.asked.clear()
    episode = completion([99, 1, 99, 2, 3], [-1.0, -1.0, -1.0], starts=(0, 2))
    ((shaped,), _) = TeacherShaper(toy, 0.7).shape(0, [group(episode, scores=[1.0])])
    assert toy.asked == [[99, 1], [99, 2, 3]], "it sees every context of an episode"
    assert_allclose(shaped.completions[0].rewards_T, [0, 0.9, 0, 0.8, 0.7])
    silent = SimpleNamespace(logprobs=lambda rows, temperature: [])
    faults = (
        (Toy(wrong=np.nan), "model.not-finite"),
        (Toy(wrong=-np.inf), "model.not-finite"),
        (silent, "teacher.wrong-rows"),
    )
    for wrong, code in faults:
        assert refused(TeacherShaper(wrong, 0.7).shape, 0, [group(completion([99, 1], [-1.0]), scores=[0.0])]) == [code]


def test_what_a_teacher_settled_on_survives_a_resume(monkeypatch):
    shaper, resumed = TeacherShaper(Toy(limits={"pack_tokens": 512}), 0.7), TeacherShaper(other := Toy(), 0.7)
    resumed.retrain_load_state(shaper.retrain_save_state() | {"health": {}})
    assert other.limits == {"pack_tokens": 512}
    assert TeacherShaper(Toy(), 0.7).retrain_save_state() == {}
    with pytest.raises(api.ResumeError, match="bad-teacher-state"):
        resumed.retrain_load_state({"teacher": {"pack_tokens": "many"}})
    resumed.retrain_run_end()
    assert other.is_closed

    def load(config, plugins):
        assert config.model.model == "big"
        return SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1, "c": 2})

    monkeypatch.setattr("retrain.credit.teacher.load_tokenizer", load)
    toy = Toy()
    assert open_teacher(context({"a": 0, "b": 1, "c": 2}, toy, model="big"))
    with pytest.raises(api.ConfigError) as caught:
        open_teacher(context({"a": 0, "b": 2, "c": 1}, toy, model="big"))
    assert codes_in(caught) == ["teacher.other-tokenizer"]
    assert "3 and 3 tokens, 2 of" in caught.value.problems[0].why
    assert open_teacher(context({}, toy, adapter="logs/a")), "the same model has the same tokens"
    assert refused(open_teacher, context({}, engine="vllm")) == ["teacher.not-installed"]
    plugins = SimpleNamespace(traits_of=lambda kind, name, form: api.EngineTraits())
    assert refused(open_teacher, replace(context({}), plugins=plugins)) == ["teacher.not-installed"]


def context(student, answer=None, **teacher):
    tables = {"model": schema.ModelTable(model="student"), "teacher": TeacherTable(**teacher)}
    traits = api.EngineTraits(open_teacher=lambda context: answer)
    plugins = SimpleNamespace(traits_of=lambda kind, name, form: traits if answer else None)
    tokenizer = SimpleNamespace(get_vocab=lambda: student)
    return api.PluginContext(config=Config(tables=tables), seeds=api.Seeds(1), plugins=plugins, tokenizer=tokenizer)


BACKEND = """
from dataclasses import replace
import numpy as np
from retrain.api import PluginSpec, hookimpl
from toy_parts import CAPABILITIES, VOCABULARY, Options, ToyBackend

OFFERED = replace(CAPABILITIES, regularisers=frozenset({"kl_log", "kl_reward", "kl_loss"}))

class Anchored(ToyBackend):
    capabilities = OFFERED
    def reference_logprobs(self, rows, temperature):
        return [np.where(row.action_T, -np.log(VOCABULARY), 0.0) for row in rows]
    def train(self, batch):
        for row in batch.rows:
            assert (row.reference_logprobs_T is not None) == (row.kl_coef > 0)
        return super().train(batch)

@hookimpl
def retrain_register_backends(register):
    register(PluginSpec(name="anchored", summary="A toy.", factory=Anchored, params=Options, traits=OFFERED))
"""


@pytest.fixture
def run(command, distribution, toy_arguments, tmp_path):
    """`run("name", "--kl-coef", "0.1")`: what a run leaves."""
    distribution("retrain-anchored", {"anchored": BACKEND})
    own = [*toy_arguments, "--backend", "anchored", "--save-every", "2", "--batch-size", "6", "--group-size", "8"]

    def train(name, *arguments):
        result = command(*own, "--log-dir", name, *arguments)
        assert result.code == 0, result.err
        return outcome(tmp_path / name)

    return train


def test_measuring_it_changes_nothing(run):
    (measured, *with_it), (plain, *without) = (
        run("a", "--max-steps", "3"),
        run("b", "--max-steps", "3", "--kl-log=false"),
    )
    assert any("kl_mean" in line for line in measured)
    assert [{k: v for k, v in line.items() if k not in ("kl_mean", "kl_k1_mean")} for line in measured] == plain
    assert with_it == without


@pytest.mark.long
def test_a_steered_coefficient_is_the_same_after_a_resume(run, command, tmp_path):
    keys = ("--kl-coef", "0.1", "--kl-target", "1e-6", "--kl-horizon", "64")
    straight = run("straight", *keys, "--max-steps", "4")
    coefs = [line["kl_coef"] for line in straight[0] if line["step"] >= 0]
    assert (coefs[0], len(set(coefs))) == (0.1, 4)
    run("halves", *keys, "--max-steps", "2")
    result = command("--resume", "halves", "--log-dir", "halves", "--max-steps", "4")
    assert result.code == 0, result.err
    assert outcome(tmp_path / "halves")[0] == straight[0]
