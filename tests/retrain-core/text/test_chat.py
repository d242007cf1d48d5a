"""From messages to text and tokens: what the template is given, and what is said when it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import DataTable
from retrain.kernel.errors import ConfigError
from retrain.kernel.types import Example
from retrain.tasks.prompts import encode_prompts
from retrain.text.chat import chat_text, check_template_args, prompt_text
from tests.kit.problems import codes_in

THINKING = (
    "{% if tools %}{% for t in tools %}{{ t.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{{ m.content }} {% endfor %}{% if enable_thinking %}wait {% endif %}so"
)


@pytest.fixture(scope="module")
def tokenizer_without_template(tokenizer_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture
def tokenizer(tokenizer_without_template: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tokenizer_without_template, "chat_template", THINKING)
    return tokenizer_without_template


def config(**data: Any) -> Config:
    return Config(tables={"data": DataTable(instruction="", **data)})


def task(prompt: Any, name: str = "e") -> Example:
    return Example(id=name, prompt=prompt, reference="1")


def encode_prompt(example: Example, tokenizer: Any, config: Config) -> Any:
    """Token ids of one example's prompt."""
    return encode_prompts([example], tokenizer, config)[0]


def test_template_args_reach_the_template(tokenizer: Any) -> None:
    with_it, without = config(template_args={"enable_thinking": True}), config(template_args={"enable_thinking": False})
    assert tokenizer.decode(encode_prompt(task("what"), tokenizer, with_it)) == "what wait so"
    assert tokenizer.decode(encode_prompt(task("what"), tokenizer, without)) == "what so"
    assert check_template_args(tokenizer, with_it) == ()


def test_tools_reach_the_template_and_the_chat_ends_where_the_answer_begins(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "what"}]
    assert chat_text(messages, tokenizer, {}, tools=[{"name": "plus"}]) == "plus what so"
    assert messages == [{"role": "user", "content": "what"}]


def test_arguments_that_the_template_does_not_read_are_noted(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (note,) = check_template_args(tokenizer, config(template_args={"enable_thinkin": False}))
    assert "template_args" in note
    assert "does not read 'enable_thinkin'; did you mean 'enable_thinking'?" in note
    monkeypatch.setattr(tokenizer, "chat_template", None)
    (note,) = check_template_args(tokenizer, config(template_args={"enable_thinking": False}))
    assert "has no chat template" in note
    assert check_template_args(tokenizer, config()) == ()


def test_what_the_kernel_decides_is_refused(tokenizer: Any) -> None:
    names = ("messages", "tools", "tokenize", "add_generation_prompt", "chat_template", "return_dict", "padding")
    with pytest.raises(ConfigError) as caught:
        check_template_args(tokenizer, config(template_args=dict.fromkeys(names, "x")))
    assert codes_in(caught) == ["data.template-argument"] * len(names)


SYSTEM = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]


@pytest.mark.parametrize(
    ("template", "prompt", "code"),
    [
        (THINKING, SYSTEM, "data.template-refuses"),
        *((text, "y", "data.template-refuses") for text in ("{{ messages[5].content.upper() }}", "{% for %}")),
        ("{{ 1 // 0 }}", "y", "data.template-refuses"),
        *((text, "half a pair \ud800", "data.tokenizer-refuses") for text in (THINKING, None)),
    ],
)
def test_a_prompt_that_is_refused_names_its_example(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, template: str | None, prompt: Any, code: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    good = [task("what", "good"), task("is", "fine")] if template in (THINKING, None) else []
    with pytest.raises(ConfigError) as caught:
        encode_prompts([*good[:1], task(prompt, "bad\x1b[31m"), *good[1:]], tokenizer, config())
    (problem,) = caught.value.problems
    assert problem.code == code
    assert problem.where.startswith("example bad")
    assert "\x1b" not in str(problem)
    str(problem).encode()


def test_many_at_once_are_what_one_by_one_gives(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrain.text.chat.BATCH", 7)
    tasks = [task(f"what is {i % 10} plus {i % 7} ?", f"e{i}") for i in range(40)]
    for template in (THINKING, None):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        together = [ids_T.tolist() for ids_T in encode_prompts(tasks, tokenizer, config())]
        assert together == [encode_prompt(one, tokenizer, config()).tolist() for one in tasks]
        assert len({len(ids) for ids in together}) == 1


def test_a_long_prompt_is_neither_cut_nor_warned_about(tokenizer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer.model_max_length = 10
    assert len(encode_prompt(task("what " * 50), tokenizer, config())) == 51
    assert "longer than" not in capfd.readouterr().err


def test_a_chat_and_a_text_differ_and_equal_chats_do_not() -> None:
    chat = [{"role": "user", "content": "a"}]
    turned = [{"content": "a", "role": "user"}]
    assert prompt_text(task(chat)) == prompt_text(task(tuple(turned)))
    assert prompt_text(task(chat)) != prompt_text(task([{"role": "system", "content": "a"}]))
    assert prompt_text(task("a")) != prompt_text(task(chat))
