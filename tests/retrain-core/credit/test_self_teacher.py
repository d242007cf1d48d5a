"""`[distil]`: what the teacher is shown, which rows have one, and what is refused before the model loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from retrain.api import Config, ConfigError, Example, Group, Outcome, Score, load_plugins
from retrain.credit.algorithm import CreditAlgorithm, train_rows
from retrain.credit.flow import build_flow
from retrain.credit.self_teacher import SelfTeacherShaper, require_privileged
from retrain.kernel.config.plugin_tables import DistilTable
from retrain.kernel.config.schema import AlgorithmTable, DataTable, TrainingTable
from retrain.run.configure import load_checked
from tests.kit.credit_parts import completion
from tests.kit.problems import codes_in

SDFT = "{prompt}|{privileged}"


class Letters:
    """A tokenizer of one token per letter."""

    chat_template = None

    def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


class Backend:
    """Its reference gives each token the log-probability -position / 100; it has no other teacher."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def reference_logprobs(self, rows: Any, temperature: float) -> list[Any]:
        assert temperature == 0.5
        self.asked += ["".join(map(chr, row.tokens_T)) for row in rows]
        return [np.where(row.action_T, -np.arange(len(row.tokens_T)) / 100, 0.0) for row in rows]


def config(instruction: str = "", **keys: Any) -> Config:
    return Config(
        tables={
            "distil": DistilTable(teacher="base", **keys),
            "data": DataTable(instruction=instruction),
            "training": TrainingTable(temperature=0.5),
            "algorithm": AlgorithmTable(
                advantage_mode="distillation", transform_mode="none", uncertainty_kind="surprisal"
            ),
        }
    )


def shaped(group: Group, **keys: Any) -> tuple[Group, dict[str, float], list[str]]:
    backend = Backend()
    context: Any = SimpleNamespace(config=config(**keys), tokenizer=Letters())
    (found,), fields = SelfTeacherShaper(context, backend).shape(0, [group])
    return found, dict(fields), backend.asked


def group_of(*said: tuple[str, Score], prompt: Any = "2+2", opening: str = "", **info: Any) -> Group:
    opening = opening or (prompt if isinstance(prompt, str) else prompt[-1]["content"])
    rows = []
    for text, _ in said:
        tokens = [*map(ord, opening + text)]
        row = completion(tokens, [-0.5] * len(tokens))
        action_T = np.arange(len(tokens)) >= len(opening)
        rows.append(replace(row, action_T=action_T, logprobs_T=np.where(action_T, -0.5, 0.0), text=text))
    example = Example(id="a", prompt=prompt, reference="4", info=info)
    return Group(example=example, completions=tuple(rows), scores=tuple(score for _, score in said))


def scored(value: float, detail: str = "") -> Score:
    return Score(outcome=Outcome.SCORED, value=value, detail=detail)


KEYS = {
    "template": "{prompt}[{solution}{feedback}]",
    "solution_template": "S{solution}",
    "feedback_template": "F{feedback}",
}


def test_the_first_other_success_and_the_feedback_are_shown() -> None:
    group = group_of(("5", scored(0.0, "too big")), ("4", scored(1.0)), ("four", scored(1.0)), ("", scored(0.5)))
    found, fields, asked = shaped(group, **KEYS)
    assert asked == ["2+2[S4Ftoo big]5", "2+2[Sfour]4", "2+2[S4]four"]
    assert fields["teacher_rate"] == 0.75, "nothing was sampled in the last one"
    row = found.completions[0].teacher
    assert row is not None
    start = len("2+2[S4Ftoo big]")
    assert row.logprobs_A == pytest.approx([-start / 100])
    assert found.completions[0].rewards_T is not None
    assert found.completions[0].rewards_T.tolist() == pytest.approx([0.0, 0.0, 0.0, -start / 100 + 0.5])
    assert found.raw_scores == group.raw_scores


def test_thoughts_of_a_solution_are_not_shown() -> None:
    group = group_of(("5", scored(0.0)), ("<think>2 and 2</think>4", scored(1.0)))
    right = replace(group.completions[1], answer="4", reasoning="2 and 2")
    _, _, asked = shaped(replace(group, completions=(group.completions[0], right)), **KEYS)
    assert asked == ["2+2[S4]5"]


def test_without_a_success_and_feedback_a_row_has_no_teacher_and_is_trained_all_the_same() -> None:
    group = group_of(("5", scored(0.0)), ("4", scored(1.0)), ("?", Score.failed("the verifier broke")))
    found, fields, asked = shaped(group, **KEYS)
    assert [c.teacher is None for c in found.completions] == [False, True, False]
    assert fields["teacher_rate"] == pytest.approx(2 / 3)
    assert "broke" not in "".join(asked)
    none, fields, _ = shaped(group_of(("5", scored(0.0)), ("6", scored(0.0))), **KEYS)
    assert (fields["teacher_rate"], "teacher_kl_mean" in fields) == (0.0, False)
    algorithm = CreditAlgorithm(flow=build_flow(config(**KEYS), load_plugins({})))
    credit = algorithm.assign(0, [found, none])
    assert [row.teacher is None for row in credit.rows] == [False, True, False, True, True]


def test_with_a_policy_loss_groups_without_information_have_rows_as_well() -> None:
    table = config(weight=0.5).tables["algorithm"].model_copy(update={"advantage_mode": "grpo"})
    given = config(weight=0.5)
    flow = build_flow(replace(given, tables={**given.tables, "algorithm": table}), load_plugins({}))
    equal = group_of(("4", scored(1.0)), ("4", scored(1.0)))
    rows = CreditAlgorithm(flow=flow).assign(0, [equal]).rows
    assert [row.advantages_T.any() for row in rows] == [False, False]


def test_a_demonstration_stands_in_the_last_message_of_a_chat_and_the_instruction_follows() -> None:
    chat = [{"role": "user", "content": "2+2"}]
    _, _, asked = shaped(group_of(("5", scored(0.0)), prompt=chat, privileged="2+2=4"), template=SDFT)
    assert asked == ["2+2|2+2=45"]
    text = group_of(("5", scored(0.0)), opening="2+2\nBox it.", shown="4")
    _, _, asked = shaped(text, template=SDFT, privileged="shown", instruction="Box it.")
    assert asked == ["2+2|4\nBox it.5"]
    assert shaped(group_of(("5", scored(0.0))), template=SDFT)[1]["teacher_rate"] == 0.0


def test_a_long_context_loses_its_beginning() -> None:
    _, _, asked = shaped(group_of(("5", scored(0.0)), privileged="2+2=4"), template=SDFT, max_context_tokens=3)
    assert asked == ["2=45"]


def test_a_completion_that_did_not_begin_with_its_prompt_or_began_again_has_no_teacher() -> None:
    group = group_of(("5", scored(0.0)), ("6", scored(0.0)), privileged="4")
    other = replace(group.completions[0], tokens_T=group.completions[0].tokens_T + 1)
    again = replace(group.completions[1], tokens_T=np.array([*map(ord, "2+265")]), starts=(0, 3))
    again = replace(again, action_T=np.arange(5) > 2, logprobs_T=np.zeros(5), starts=(0, 4))
    assert shaped(replace(group, completions=(other, again)), template=SDFT)[1]["teacher_rate"] == 0.0
    assert all(row.teacher is None for row in train_rows(again, np.zeros(2)))


@pytest.mark.parametrize("name", ["template", "solution_template", "feedback_template"])
@pytest.mark.parametrize("text", ["{answer}", "{}", "{prompt"])
def test_a_template_with_an_unknown_field_is_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"field|expected"):
        DistilTable(**{name: text})


def test_a_column_that_no_task_has_is_refused() -> None:
    context: Any = SimpleNamespace(config=config(template=SDFT))
    without = SimpleNamespace(prompts=[SimpleNamespace(example=group_of(("5", scored(0.0))).example)])
    with pytest.raises(ConfigError) as caught:
        require_privileged(without, context)
    assert codes_in(str(caught.value)) == ["distil.no-column"]
    of_group: Any = SimpleNamespace(config=config())
    require_privileged(without, of_group)


BASE = """
[model]
model = "builtin:tiny"
{model}
[data]
source = "arithmetic"
[algorithm]
{algorithm}
[backend]
backend = "{backend}"
[distil]
{distil}
{more}
"""
ON = 'recipe = "sdpo"'


@pytest.mark.parametrize(
    ("given", "codes"),
    [
        ({"algorithm": ON}, []),
        ({"algorithm": 'recipe = "sdft"'}, []),
        ({"algorithm": ON, "distil": "alpha = 0.5"}, ["distil.alpha"]),
        ({"algorithm": ON, "distil": "weight = 0.5"}, ["distil.weight"]),
        ({"algorithm": ON + '\nadvantage_mode = "grpo"'}, ["distil.weight"]),
        ({"algorithm": ON + '\nadvantage_mode = "grpo"', "distil": "weight = 0.5"}, []),
        ({"algorithm": ON + '\nloss = "ppo"'}, ["distil.loss"]),
        ({"algorithm": ON, "more": "[kl]\ncoef = 0.1"}, ["distil.coef"]),
        ({"algorithm": ON, "more": "[entropy]\ncoef = 0.1"}, ["distil.coef"]),
        ({"algorithm": ON, "more": '[teacher]\nadapter = "logs/a"'}, ["distil.teacher"]),
        ({"algorithm": ON, "more": '[reward]\ntype = "none"\n[eval]\nexamples = 0'}, ["distil.template"]),
        ({"algorithm": ON, "model": "lora_rank = 0"}, ["distil.teacher"]),
        ({"algorithm": ON, "model": "lora_rank = 0", "distil": 'teacher = "live"'}, []),
        ({"algorithm": ON, "backend": "tinker", "distil": 'teacher = "base"\nratio_cap = 0.0'}, []),
        ({"algorithm": ON, "backend": "tinker", "distil": 'teacher = "base"'}, ["distil.ratio-cap"]),
        (
            {
                "algorithm": ON + '\nloss = "cispo"\nclip_eps_high = 2.0',
                "backend": "tinker",
                "distil": 'teacher = "base"',
            },
            [],
        ),
        (
            {"algorithm": 'recipe = "sdft"', "backend": "tinker", "distil": "ratio_cap = 0.0\nskip_tokens = 1"},
            ["distil.mode", "distil.skip-tokens"],
        ),
        ({"algorithm": ON, "backend": "tinker", "distil": "ratio_cap = 0.0"}, ["distil.teacher"]),
        ({"algorithm": ON, "backend": "prime_rl"}, ["distil.teacher"]),
        ({"algorithm": 'level = "turn"\nloss = "gspo"', "backend": "prime_rl"}, ["prime-rl.key-without-effect"]),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(given: dict[str, str], codes: list[str], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        BASE.format(**{"model": "", "distil": "", "more": "", "backend": "local"} | given), encoding="utf-8"
    )
    try:
        load_checked([str(file)], load_plugins({}))
        found = []
    except ConfigError as error:
        found = [code for code in codes_in(str(error)) if code.startswith("distil") or code in codes]
    assert sorted(set(found)) == sorted(codes)
