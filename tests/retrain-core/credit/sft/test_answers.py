"""Examples with answers as rows: what is trained, what ends it, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.credit.warm_up import end_of_turn, solve
from retrain.kernel.config.plugin_tables import SftTable
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import ModelTable, TrainingTable
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.errors import ConfigError
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Example

EOS = 0
CHATML = (
    "{%- for message in messages %}{{- '<turn> ' + message['role'] + ' ' + message['content'] + ' <end> <eos>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<turn> assistant ' }}{%- endif %}"
)


@pytest.fixture
def tokenizer(tokenizer_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


def configured(answer: str = "reference", *, max_tokens: int = 4, model: str = "nowhere") -> Config:
    tables = {"sft": SftTable(answer=answer), "training": TrainingTable(max_tokens=max_tokens)}
    return Config(tables={**tables, "model": ModelTable(model=model)})


def prompt(name: str, reference: str = "", **info: object) -> Prompt:
    example = Example(id=name, prompt="what is 1", reference=reference, info=info)
    return Prompt(example=example, tokens_T=np.array([12, 13, 3]))


def test_the_answer_and_its_end_are_trained_and_the_prompt_is_not(tokenizer: Any) -> None:
    solved = solve([prompt("a", " 1 2 ")], configured(), tokenizer, end_of_turn=EOS, context_length=6)
    row = solved.rows["a"]
    assert row.tokens_T.tolist() == [12, 13, 3, *tokenizer("1 2")["input_ids"], EOS]
    assert row.action_T.tolist() == [False] * 3 + [True] * 3
    assert row.advantages_T.tolist() == [0.0] * 3 + [1.0] * 3
    assert not solved.left_out


def test_answers_that_sampling_could_not_give_are_left_out_and_counted(tokenizer: Any) -> None:
    prompts = [prompt("ok", "1 2 3"), prompt("none"), prompt("blank", " \n"), prompt("long", "1 2 3 4")]
    solved = solve(prompts, configured(), tokenizer, end_of_turn=EOS, context_length=None)
    assert [each.example.id for each in solved.prompts] == ["ok"] == list(solved.rows)
    assert solved.left_out == {"without an answer": 2, "of more than max_tokens tokens": 1}
    narrow = solve([*prompts, prompt("short", "1")], configured(), tokenizer, end_of_turn=EOS, context_length=6)
    assert list(narrow.rows) == ["short"], "with its end the other has one token too many for the context"
    assert narrow.left_out["beyond the model's context"] == 1


def test_a_column_may_hold_the_worked_solution(tokenizer: Any) -> None:
    prompts = [
        prompt("text", "7", steps="so 7 ."),
        prompt("number", "7", steps=7),
        *(prompt(repr(odd), "7", steps=odd) for odd in (None, True, ["7"], {"7": 7})),
        prompt("absent", "7"),
    ]
    solved = solve(prompts, configured("steps"), tokenizer, end_of_turn=EOS, context_length=None)
    assert list(solved.rows) == ["text", "number"]
    assert tokenizer.decode(solved.rows["text"].tokens_T[3:-1]) == "so 7 ."
    assert solved.left_out == {"without an answer": 5}


def test_a_misspelt_column_is_refused_with_those_that_exist(tokenizer: Any) -> None:
    with pytest.raises(ConfigError) as error:
        solve([prompt("a", "7", steps="so 7 .\x1b[2J")], configured("step"), tokenizer, end_of_turn=0, context_length=9)
    (problem,) = error.value.problems
    assert (problem.code, problem.why) == ("sft.no-answers", "1 without an answer; columns: steps")


def test_the_end_of_a_turn_is_the_templates_where_sampling_stops_at_it(
    tokenizer: Any, plugins: Plugins, tmp_path: Path
) -> None:
    config = configured(model=str(tmp_path))
    assert end_of_turn(tokenizer, config, plugins) == EOS, "no template"
    tokenizer.add_tokens(["<turn>", "<end>"], special_tokens=True)
    tokenizer.chat_template = CHATML
    end = tokenizer.convert_tokens_to_ids("<end>")
    assert end_of_turn(tokenizer, config, plugins) == EOS, "sampling would go on after <end>"
    for stops in ([end, EOS], end):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}), encoding="utf-8")
        assert end_of_turn(tokenizer, config, plugins) == end
    for damaged in ("[]", "{", '{"eos_token_id": "x"}'):
        (tmp_path / "generation_config.json").write_text(damaged, encoding="utf-8")
        assert end_of_turn(tokenizer, config, plugins) == EOS
    tokenizer.chat_template = "{{ raise_exception('no assistant') }}"
    assert end_of_turn(tokenizer, config, plugins) == EOS
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no-end-token"):
        end_of_turn(tokenizer, config, plugins)
