"""What a teacher adds to a step: rewards of single tokens for every completion, and how far it is away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from retrain.api import BackendError, ConfigError, EngineTraits, PluginContext, ResumeError, Score, Seeds
from retrain.credit.teacher import TeacherShaper, open_teacher
from retrain.kernel.config import schema
from retrain.kernel.config.plugin_tables import TeacherTable
from retrain.kernel.config.resolved import Config
from tests.kit.credit_parts import completion, group
from tests.kit.problems import codes_in


@dataclass
class Toy:
    """A teacher for whom token n has log-probability -n / 10."""

    asked: list[list[int]] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)
    wrong: float | None = None
    is_closed: bool = False

    def logprobs(self, rows: Sequence[Any], temperature: float) -> list[np.ndarray]:
        assert temperature == 0.7
        self.asked += [row.tokens_T.tolist() for row in rows]
        found = [np.where(row.action_T, -row.tokens_T / 10, 0.0) for row in rows]
        if self.wrong is not None:
            found[0][-1] = self.wrong
        return found

    def state(self) -> dict[str, int]:
        return self.limits

    def restore(self, state: Any) -> None:
        self.limits = {name: int(value) for name, value in state.items()}

    def close(self) -> None:
        self.is_closed = True


def test_every_completion_gets_the_difference_as_rewards_of_its_tokens() -> None:
    toy = Toy()
    before = np.array([0.0, 1.0, 0.0, 0.0])
    judged = completion([99, 1, 2, 3], [-0.2, -0.2, -0.2], rewards_T=before)
    others = [completion([99, 99, 5], [-0.9]), completion([99, 4], [-0.4])]
    scores = [Score.of(1.0), Score.no_verdict("?"), Score.failed("!")]
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


def test_every_context_of_an_episode_is_a_row_of_its_own() -> None:
    toy = Toy()
    episode = completion([99, 1, 99, 2, 3], [-1.0, -1.0, -1.0], starts=(0, 2))
    ((shaped,), _) = TeacherShaper(toy, 0.7).shape(0, [group(episode, scores=[Score.of(0.0)])])
    assert toy.asked == [[99, 1], [99, 2, 3]]
    assert_allclose(shaped.completions[0].rewards_T, [0, 0.9, 0, 0.8, 0.7])


class Silent(Toy):
    def logprobs(self, rows: Sequence[Any], temperature: float) -> list[np.ndarray]:
        return []


@pytest.mark.parametrize(
    ("toy", "code"),
    [
        (Toy(wrong=float("nan")), "model.not-finite"),
        (Toy(wrong=float("-inf")), "model.not-finite"),
        (Silent(), "teacher.wrong-rows"),
    ],
)
def test_an_answer_without_numbers_ends_the_step(toy: Toy, code: str) -> None:
    with pytest.raises(BackendError) as caught:
        TeacherShaper(toy, 0.7).shape(0, [group(completion([99, 1], [-1.0]), scores=[0.0])])
    assert codes_in(caught) == [code]


def test_what_a_teacher_settled_on_survives_a_resume() -> None:
    shaper, resumed = TeacherShaper(Toy(limits={"pack_tokens": 512}), 0.7), TeacherShaper(other := Toy(), 0.7)
    resumed.retrain_load_state(shaper.retrain_save_state() | {"health": {}})
    assert other.limits == {"pack_tokens": 512}
    assert TeacherShaper(Toy(), 0.7).retrain_save_state() == {}
    with pytest.raises(ResumeError, match="bad-teacher-state"):
        resumed.retrain_load_state({"teacher": {"pack_tokens": "many"}})
    resumed.retrain_run_end()
    assert other.is_closed


def context(student: dict[str, int], answer: object = None, **teacher: Any) -> PluginContext:
    tables = {"model": schema.ModelTable(model="student"), "teacher": TeacherTable(**teacher)}
    engine = SimpleNamespace(spec=SimpleNamespace(traits=EngineTraits(open_teacher=lambda context: answer)))
    plugins: Any = SimpleNamespace(find=lambda kind, name: [engine] if answer else [])
    tokenizer = SimpleNamespace(get_vocab=lambda: student)
    return PluginContext(config=Config(tables=tables), seeds=Seeds(1), plugins=plugins, tokenizer=tokenizer)


def test_a_teacher_of_another_vocabulary_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: Config, plugins: Any) -> Any:
        assert config.model.model == "big"
        return SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1, "c": 2})

    monkeypatch.setattr("retrain.credit.teacher.load_tokenizer", load)
    toy = Toy()
    assert open_teacher(context({"a": 0, "b": 1, "c": 2}, toy, model="big"))
    with pytest.raises(ConfigError) as caught:
        open_teacher(context({"a": 0, "b": 2, "c": 1}, toy, model="big"))
    assert codes_in(caught) == ["teacher.other-tokenizer"]
    assert "3 and 3 tokens, 2 of" in caught.value.problems[0].why
    assert open_teacher(context({}, toy, adapter="logs/a")), "the same model has the same tokens"
    with pytest.raises(ConfigError) as caught:
        open_teacher(context({}, engine="vllm"))
    assert codes_in(caught) == ["teacher.not-installed"]
