"""A conversation: rendered as in training, harmless on a terminal, and able to look at the policy that answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd
import pytest

from retrain.kernel.errors import ConfigError
from retrain.kernel.types import Example, GroupStatus, Sample, SampleRequest, SamplingParams, Score, StopReason
from retrain.run.opened import Opened, subject_config
from retrain.tasks.prompts import encode_prompts
from retrain.text.chat import encode
from retrain.use import chat_command
from retrain.use.chat import (
    ORANGE,
    UNSURE,
    Conversation,
    CreditedAnswer,
    CreditedGroup,
    Spoken,
    by_credit,
    credit_of,
    harmless,
    shaded,
)
from retrain.use.sample_command import Wanted, prompt_tokens, prompts_of, read_prompts, sample_file
from retrain.use.serving.text_stream import TextStream
from tests.kit.invoke import invoke

INSTRUCTION = "Answer in \\boxed{}."


@pytest.fixture
def source(tiny: Opened) -> Iterator[Opened]:
    """With a system prompt and an instruction, as a run may have them."""
    data = tiny.config.data.model_copy(update={"system_prompt": "Be brief.", "instruction": INSTRUCTION})
    config = replace(tiny.config, tables={**tiny.config.tables, "data": data})
    yield replace(tiny, config=config)
    tiny.use(None)


def greedy(source: Opened, messages: list[dict[str, str]]) -> str:
    (ids,) = encode([messages], source.tokenizer, source.config.data.template_args, names=["it"])
    params = SamplingParams(max_tokens=24, temperature=1.0, greedy=True)
    ((sample,),) = source.backend.sample([SampleRequest(prompt_T=np.array(ids), seeds_G=(0,))], params)
    return str(source.tokenizer.decode(sample.tokens_T, skip_special_tokens=True))


def test_turns_are_rendered_as_in_training_and_remembered(
    source: Opened, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chat = Conversation(source, plain=False)
    chat.introduce()
    assert "Be brief." in (told := capsys.readouterr().err)
    assert INSTRUCTION in told
    chat.hear("/temperature 0")
    said: list[str] = []
    messages = [{"role": "system", "content": "Be brief."}]
    for question in ("What is 2 + 2?", "What is 9 * 8?"):
        capsys.readouterr()
        assert chat.hear(question)
        said.append(capsys.readouterr().out)
        messages.append({"role": "user", "content": f"{question}\n{INSTRUCTION}"})
        messages.append({"role": "assistant", "content": greedy(source, messages)})
        assert said[-1] == messages[-1]["content"] + "\n"
    file = tmp_path / "chat.jsonl"
    chat.hear(f"/save {file}")
    assert read_prompts(str(file), source.config, source.plugins) == [messages]
    before = file.read_bytes()
    chat.hear(f"/save {file}")
    assert "cannot be written" in capsys.readouterr().err
    assert file.read_bytes() == before
    chat.hear("/reset")
    chat.hear("/system")
    capsys.readouterr()
    chat.hear("What is 2 + 2?")
    plain = [{"role": "user", "content": f"What is 2 + 2?\n{INSTRUCTION}"}]
    assert capsys.readouterr().out == greedy(source, plain) + "\n"


def test_the_policy_of_an_environment_is_asked_without_what_training_never_added(
    source: Opened, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = source.config.tables["environment"].model_copy(update={"provider": "verifiers"})
    config = replace(source.config, tables={**source.config.tables, "environment": environment})
    chat = Conversation(replace(source, config=config), plain=False)
    chat.introduce()
    told = capsys.readouterr().err
    assert "Be brief." not in told
    assert INSTRUCTION not in told
    chat.hear("What is 2 + 2?")
    assert chat.messages[0] == {"role": "user", "content": "What is 2 + 2?"}


def test_another_policy_answers_too_and_only_the_first_is_remembered(
    source: Opened, other: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # a clone has a folder `logs` once it was trained in
    source.use(other)
    adapter = replace(source, subject=replace(source.subject, folder=other))
    chat = Conversation(adapter, plain=True)
    for line in ("/temperature 0", "/compare base", "What is 2 + 2?"):
        chat.hear(line)
    first, second = capsys.readouterr().out.split("the base:\n")
    assert first.partition("\n")[2].rstrip("\n") == chat.messages[-1]["content"]
    source.use(None)
    assert second == greedy(source, [{"role": "user", "content": "What is 2 + 2?"}]) + "\n"
    assert first != second
    chat.hear("/compare off")
    chat.hear("What is 2 + 2?")
    assert "the base" not in capsys.readouterr().out
    chat.hear("/compare logs/nowhere")
    assert "same base" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/nope", "/help"),
        ("/temperature", "0 to 10"),
        ("/temperature nan", "0 to 10"),
        ("/credit 4", "send a question first"),
        ("/save x", "nothing has been said"),
        ("a " * 3000, "/reset"),
        ("\ud800", "tokenizer"),
    ],
)
def test_what_cannot_be_done_is_said_and_the_conversation_goes_on(
    source: Opened, capsys: pytest.CaptureFixture[str], line: str, told: str
) -> None:
    chat = Conversation(source, plain=False)
    assert chat.hear(line)
    assert told in capsys.readouterr().err
    assert not chat.messages
    assert not chat.hear("/quit")


def test_an_interrupted_answer_is_kept_as_far_as_it_came(
    source: Opened, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, take = Conversation(source, plain=True), Spoken.take

    def interrupted(spoken: Spoken, *given: Any, **options: Any) -> bool:
        take(spoken, *given, **options)
        raise KeyboardInterrupt

    chat.hear("/temperature 0")
    with monkeypatch.context() as patched:
        patched.setattr(Spoken, "take", interrupted)
        chat.hear("What is 2 + 2?")
    assert "(stopped)" in capsys.readouterr().out
    whole = greedy(source, [{"role": "user", "content": "What is 2 + 2?"}])
    assert whole.startswith(chat.messages[-1]["content"])
    assert chat.messages[-1]["content"] != whole


def test_words_of_a_model_cannot_steer_the_terminal(tiny: Opened, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "ok\x1b[2J\x1b]0;title\x07\r\u202ehidden\nnext\x9b31m"
    for text in (harmless(evil), shaded(evil, 1.0 / UNSURE, ORANGE), by_credit([evil], np.array([1.0]), 1.0)):
        left = click.unstyle(text)
        assert not any(ord(c) < 32 and c != "\n" for c in left)
        assert not set(left) & set("\x7f\x9b\u202e\x1b\x07")
        assert left.count("\n") == 1
    spoken = Spoken(stream=TextStream(tiny.tokenizer), is_shaded=True)
    ids = tiny.tokenizer("a\x1b[31mb", add_special_tokens=False)["input_ids"]
    piece = Sample(tokens_T=np.array(ids), logprobs_T=np.zeros(len(ids)), stop_reason=StopReason.EOS, policy_version=0)
    spoken.take(0, 0, piece, is_done=True)
    assert "\x1b" not in capsys.readouterr().out


def test_credit_is_shown_answer_by_answer(
    source: Opened, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [
        CreditedAnswer(score=Score.of(1.0), texts=["it is", " 4"], credit_A=np.array([0.25, 0.75])),
        CreditedAnswer(score=Score.no_verdict("unclear"), texts=["hm\x1b[2J"], credit_A=np.zeros(1)),
    ]
    group = CreditedGroup(condition="grpo+gtpo", status=GroupStatus.INFORMATIVE, answers=answers)
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr("retrain.use.chat.credit_of", lambda _, *given, **__: (asked.append(given), group)[1])
    chat = Conversation(source, plain=False)
    chat.hear("What is 2 + 2?")
    capsys.readouterr()
    chat.hear("/credit 4")
    captured = capsys.readouterr()
    assert asked == [("What is 2 + 2?", "4")], "the question without the instruction"
    assert click.unstyle(captured.out) == (
        "1. reward 1, credit +1.000\nit is 4\n2. no_verdict, credit +0.000\nhm\N{REPLACEMENT CHARACTER}[2J\n"
    )
    assert "grpo+gtpo" in captured.err


@pytest.mark.long
def test_credit_is_what_the_algorithm_gives_to_a_scored_group(source: Opened) -> None:
    found = credit_of(source, "What is 2 + 2?", "4", size=6, number=1)
    assert len(found.answers) == 6
    rewards = [answer.score.value for answer in found.answers]
    assert set(rewards) == {0.0, 1.0}, "the group can teach"
    assert found.status is GroupStatus.INFORMATIVE
    for answer, reward in zip(found.answers, rewards, strict=True):
        assert len(answer.texts) == len(answer.credit_A)
        assert (answer.credit_A.sum() > 0) == (reward == 1.0)


def test_each_line_of_stdin_is_a_turn(source: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_command, "opened", lambda *_: nullcontext(source))
    heard: list[str] = []
    monkeypatch.setattr(Conversation, "hear", lambda self, line: (heard.append(line), not line.startswith("/quit"))[1])
    given = "What is\\\n2 + 2?\r\n\n/entropy\nlast\\"
    result = invoke(chat_command.command, ["builtin:tiny", "--greedy"], input=given, obj=source.plugins)
    assert result.exit_code == 0, result.output
    assert heard == ["/temperature 0", "What is\n2 + 2?", "", "/entropy", "last"]


# ---------------------------------------------------------------- retrain sample


QUESTIONS = ["What is 2 + 2?", "What is 9 * 8?", "What is 1 + 1?"]


def wanted(**changes: Any) -> Wanted:
    given = {"samples": 1, "greedy": False, "seed": 0, "raw": False, "tokens": True, "logprobs": True}
    return Wanted(**(given | changes))


def lines_of(path: Path) -> list[dict[str, Any]]:
    return sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda line: line["index"])


def test_completions_are_those_of_the_engine_for_prompts_as_training_renders_them(tiny: Opened, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out.jsonl"
    sample_file(tiny, QUESTIONS, wanted(samples=3), out)
    lines = lines_of(out)
    assert [line["prompt"] for line in lines] == QUESTIONS
    for line in lines:
        assert len(line["completions"]) == 3
        assert line["num_tokens"] == [len(tokens) for tokens in line["tokens"]] == list(map(len, line["logprobs"]))
        assert line["completions"] == [tiny.tokenizer.decode(t, skip_special_tokens=True) for t in line["tokens"]]
    assert len({tuple(tokens) for line in lines for tokens in line["tokens"]}) > 5, "each has a seed of its own"
    greedy = tmp_path / "greedy.jsonl"
    sample_file(tiny, QUESTIONS, wanted(greedy=True), greedy)
    rows = encode_prompts([Example(id="q", prompt=q, reference="") for q in QUESTIONS], tiny.tokenizer, tiny.config)
    params = SamplingParams(max_tokens=24, temperature=1.0, greedy=True)
    groups = tiny.backend.sample([SampleRequest(prompt_T=row, seeds_G=(9,)) for row in rows], params)
    assert [line["tokens"][0] for line in lines_of(greedy)] == [group[0].tokens_T.tolist() for group in groups]
    np.testing.assert_allclose(lines_of(greedy)[1]["logprobs"][0], groups[1][0].logprobs_T, atol=1e-5)


def test_a_file_goes_on_where_it_was_stopped_and_takes_nothing_else(tiny: Opened, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    sample_file(tiny, QUESTIONS, wanted(), out)
    whole = out.read_text()
    out.write_text(whole.splitlines(keepends=True)[0] + '{"index": 1, "pro')
    sample_file(tiny, QUESTIONS, wanted(), out)
    assert sorted(out.read_text().splitlines()) == sorted(whole.splitlines())
    for prompts, changes in ((QUESTIONS, {"seed": 1}), (["Another?"], {}), (QUESTIONS, {"samples": 2})):
        with pytest.raises(ConfigError, match="other prompts or settings"):
            sample_file(tiny, prompts, wanted(**changes), out)
    assert sorted(out.read_text().splitlines()) == sorted(whole.splitlines())


def test_prompts_of_text_and_of_json_lines(tiny: Opened, tmp_path: Path) -> None:
    text, rows = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("One?\n\n  Two?  \n")
    assert read_prompts(str(text), tiny.config, tiny.plugins) == ["One?", "Two?"]
    chat = [{"role": "user", "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]}]
    rows.write_text('{"prompt": "One?"}\n"Two?"\n{"question": "Three?"}\n' + json.dumps({"messages": chat}) + "\n")
    joined = [{"role": "user", "content": "Hi there"}]
    assert read_prompts(str(rows), tiny.config, tiny.plugins) == ["One?", "Two?", "Three?", joined]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", "holds no prompt"),
        ('{"prompt": 3}\n', ":1"),
        ('{"prompt": "a"}\n{"promt": "b"}\n', ":2"),
        ('{"messages": [{"role": "user"}]}', ":1"),
        ('{"messages": [' * 2000, "JSON"),
        ("{nope", "JSON"),
    ],
)
def test_a_file_that_holds_no_prompts_is_told_by_line(tiny: Opened, tmp_path: Path, content: str, found: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=found):
        read_prompts(str(path), tiny.config, tiny.plugins)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_the_column_of_prompts_is_the_one_that_a_flag_names(tiny: Opened, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    table = pd.DataFrame({"Q": ["One?", "Two?"], "prompt": ["no", "no"], "gold": ["1", "2"]})
    write = {"csv": lambda: table.to_csv(path, index=False), "parquet": lambda: table.to_parquet(path)}
    write.get(suffix, lambda: table.to_json(path, orient="records", lines=suffix == "jsonl"))()
    config = subject_config(tiny.subject, tiny.plugins, ["--prompt-key", "Q"]).config
    assert read_prompts(str(path), config, tiny.plugins) == ["One?", "Two?"]
    assert read_prompts(str(path), tiny.config, tiny.plugins) == ["no", "no"]
    config = subject_config(tiny.subject, tiny.plugins, ["--prompt-key", "golf"]).config
    with pytest.raises(ConfigError, match=r"(?s)no column 'golf'.*--prompt-key.*Q, prompt, gold.*'gold'"):
        read_prompts(str(path), config, tiny.plugins)


def test_the_columns_of_a_run_come_first_and_may_be_nested(tiny: Opened) -> None:
    rows = [{"ask": {"text": "One?"}, "prompt": "no"}, {"question": "Two?"}]
    data = tiny.config.data.model_copy(update={"prompt_key": "ask.text"})
    config = replace(tiny.config, tables={**tiny.config.tables, "data": data})
    assert prompts_of([("a", row) for row in rows], config) == ["One?", "Two?"]
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    config = subject_config(tiny.subject, tiny.plugins, ["--messages-key", "log.turns"]).config
    assert prompts_of([("a", {"log": {"turns": chat}, "prompt": "no"})], config) == [chat[:1]]
    assert prompts_of([("a", {"messages": chat})], tiny.config) == [chat], "only messages_key says that it is an answer"


def test_a_prompt_that_cannot_be_read_is_named(tiny: Opened) -> None:
    for prompt, raw, found in (
        ("word " * 5000, False, "prompt 1"),
        ("\ud800", True, "prompt 1"),
        ([{"role": "user", "content": "hi"}], True, "--raw"),
    ):
        with pytest.raises(ConfigError, match=found):
            prompt_tokens(tiny, ["fine", prompt], ["prompt 0", "prompt 1"], raw=raw)
