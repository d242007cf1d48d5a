"""A warm-up with [sft]: examples with answers as rows, and a run on the toy policy that resumes in the middle."""

import json

import numpy as np
import pytest

from retrain.credit.warm_up import SupervisedSteps, end_of_turn, solve
from retrain.kernel.config.plugin_tables import SftTable
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import ModelTable, TrainingTable
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.errors import ConfigError, NonFiniteError, Problem
from retrain.kernel.types import Example
from tests.kit.overlapped import lines, outcome
from tests.kit.problems import refused
from tests.kit.shared import first_or_long

EOS = 0
CHATML = (
    "{%- for message in messages %}{{- '<turn> ' + message['role'] + ' ' + message['content'] + ' <end> <eos>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<turn> assistant ' }}{%- endif %}"
)


@pytest.fixture
def tokenizer(tokenizer_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


def configured(answer="reference", *, max_tokens=4, model="nowhere"):
    tables = {"sft": SftTable(answer=answer), "training": TrainingTable(max_tokens=max_tokens)}
    return Config(tables={**tables, "model": ModelTable(model=model)})


def prompt(name, reference="", **info):
    example = Example(id=name, prompt="what is 1", reference=reference, info=info)
    return Prompt(example=example, tokens_T=np.array([12, 13, 3]))


def test_answers_that_sampling_could_not_give_are_left_out_and_counted(tokenizer):
    row = solve([prompt("a", " 1 2 ")], configured(), tokenizer, end_of_turn=EOS, context_length=6).rows["a"]
    assert row.tokens_T.tolist() == [12, 13, 3, *tokenizer("1 2")["input_ids"], EOS]
    assert row.action_T.tolist() == [False] * 3 + [True] * 3, "the answer and its end are trained"
    assert row.advantages_T.tolist() == [0.0] * 3 + [1.0] * 3
    prompts = [prompt("ok", "1 2 3"), prompt("none"), prompt("blank", " \n"), prompt("long", "1 2 3 4")]
    solved = solve(prompts, configured(), tokenizer, end_of_turn=EOS, context_length=None)
    assert [each.example.id for each in solved.prompts] == ["ok"] == list(solved.rows)
    assert solved.left_out == {"without an answer": 2, "of more than max_tokens tokens": 1}
    narrow = solve([*prompts, prompt("short", "1")], configured(), tokenizer, end_of_turn=EOS, context_length=6)
    assert list(narrow.rows) == ["short"], "with its end the other has one token too many for the context"
    assert narrow.left_out["beyond the model's context"] == 1
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
    misspelt = [prompt("a", "7", **dict.fromkeys(("work", "steps", "by", "at"), "so 7 .\x1b[2J"))]
    with pytest.raises(ConfigError) as error:
        solve(misspelt, configured("step"), tokenizer, end_of_turn=0, context_length=9)
    (problem,) = error.value.problems
    assert (problem.code, problem.why) == ("sft.no-answers", "1 without an answer; columns: at, by, steps, work")


def test_the_end_of_a_turn_is_the_templates_where_sampling_stops_at_it(tokenizer, plugins, tmp_path):
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
    assert refused(end_of_turn, tokenizer, config, plugins) == ["model.no-end-token"]


@pytest.fixture
def run(command, toy_arguments):
    """`run("--log-dir", "a")`: three supervised steps, then two others."""
    steps = ("--max-steps", "2", "--save-every", "1", "--sft-steps", "3", "--sft-batch-size", "3")
    evals = ("--eval-examples", "2", "--eval-samples", "2", "--eval-every", "1")
    base = [*toy_arguments, *steps, *evals]
    return lambda *arguments: command(*base, *arguments)


def test_supervised_steps_come_first_and_their_lines_say_so(run, tmp_path):
    done = run("--log-dir", "a", "--sft-lr", "0.5", "--sft-source", "toy")
    assert done.code == 0, done.err
    assert "[sft] 2 examples left out: they are held out" in done.err + done.out
    found = lines(tmp_path / "a")
    assert [line["step"] for line in found] == [-4, -3, -2, -1, 0, 1]
    assert [line.get("phase") for line in found] == ["sft"] * 3 + [None] * 3
    assert all("eval_correct_rate" not in line for line in found[:3]), "evaluated when they are over"
    assert found[0]["sft_loss"] == 0.0  # what the toy reports
    assert found[0]["sft_tokens"] == 6  # a digit and its end, three times
    assert found[0]["sft_lr"] == 0.5
    assert ("loss" in found[0], found[0]["sft_left_out"]) == (False, 0)
    assert "SFT, 2 steps left | loss=" in done.err + done.out
    names = {path.name for path in (tmp_path / "a" / "adapter").iterdir()}
    assert names == {*(f"checkpoint_step_{step}" for step in (-3, -2, 0, 1)), "final"}
    assert json.loads((tmp_path / "a" / "run.json").read_text())["status"] == "done"


@pytest.mark.long
@pytest.mark.parametrize("step", first_or_long([-4, -2]))
def test_a_run_that_breaks_off_in_between_resumes_to_the_same_bytes(step, run, command, tmp_path, monkeypatch):
    assert run("--log-dir", "whole").code == 0
    take = SupervisedSteps.take

    def broken(self, number, train):
        if number == step:
            raise RuntimeError("power failure")
        return take(self, number, train)

    with monkeypatch.context() as patched:
        patched.setattr(SupervisedSteps, "take", broken)
        with pytest.raises(RuntimeError):
            run("--log-dir", "cut")
    assert [line["step"] for line in lines(tmp_path / "cut")] == [*range(-4, step)]
    done = command("--resume", "cut")
    assert done.code == 0, done.err
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_a_step_that_is_not_finite_is_rejected_and_three_in_a_row_end_the_run(run, tmp_path, monkeypatch):
    take = SupervisedSteps.take

    def refuse(batch):
        raise NonFiniteError(Problem(what="the loss is nan", fix="lower lr"))

    monkeypatch.setattr(SupervisedSteps, "take", lambda self, step, train: take(self, step, refuse))
    done = run("--log-dir", "a")
    assert done.code == 1
    assert [line["rejected"] for line in lines(tmp_path / "a")] == ["the loss is nan"] * 3
    assert {line["sft_loss"] for line in lines(tmp_path / "a")} == {None}
