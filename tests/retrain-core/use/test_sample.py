"""`retrain sample`: rendered as in training, reproducible, resumable, and clear about files that it cannot use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from retrain.kernel.errors import ConfigError
from retrain.kernel.types import Example, SampleRequest, SamplingParams
from retrain.run.opened import Opened, subject_config
from retrain.tasks.prompts import encode_prompts
from retrain.use.sample_command import Wanted, prompt_tokens, prompts_of, read_prompts, sample_file

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
