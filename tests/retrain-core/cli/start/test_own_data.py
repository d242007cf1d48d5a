"""`retrain init` for own data: the columns, the reward tried on it, and a file of only what is special."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from retrain.cli.start.own_data import Columns, DataChoice, Wishes, choose_data, find_columns
from retrain.cli.start.written import configuration_text
from retrain.kernel.config.load import all_keys
from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.discover import load_plugins
from retrain.run.tables import registered_tables
from tests.kit.problems import codes_in, refused

Command = Callable[..., Any]
Put = Callable[..., Path]
SUMS = [{"prompt": f"What is {n} + 30?", "answer": str(n + 30)} for n in range(200)]
OPTIONS = ("--reward", "match", "--max-steps", "7", "--json")
TINY = ("init", "--model", "builtin:tiny", "--data")
pytestmark = pytest.mark.usefixtures("offline")
DEFAULTS = {key.path: key.default for key in all_keys(registered_tables(load_plugins({})))}


def written(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "retrain.toml").read_text())


def test_word_problems_of_a_file(command: Command, put: Put, tmp_path: Path) -> None:
    put("tasks.jsonl", SUMS)
    done = command(*TINY, "tasks.jsonl", "--reward", "match")
    assert (done.code, done.err) == (0, "\nMeasuring how fast this machine is ...\n")
    for told in (
        "prompt: column 'prompt' (by its name)",
        "files: 200 rows from tasks.jsonl",
        "160 examples to train on, 40 held out",
        "<|im_start|>user\n  | What is 0 + 30?\n  | Put your final answer in \\boxed{}.<|im_end|>",
        r"perfect answer       \boxed{30}: the verifier reads 30, score 1",
        "bare reference       30: the verifier reads no answer, score 0",
        "Reward audit of match: passed",
        "Wrote retrain.toml (your data). Next:\n  retrain explain\n  retrain\n",
    ):
        assert told in done.out
    assert done.out.count(", as the model sees it:") == 3
    content = written(tmp_path)
    assert content["data"] == {"source": "files", "path": "tasks.jsonl"}
    assert content["eval"] == {"every": 20, "examples": 40}
    assert content["training"]["lr"] == 3e-3  # the built-in model's own
    assert content["logging"] == {"log_dir": "logs/tasks"}
    text = (tmp_path / "retrain.toml").read_text()
    assert "# The reward is the default, match: 1 when the last" in text
    for table, keys in content.items():
        for name, value in keys.items():
            assert value != DEFAULTS[f"{table}.{name}"], f"[{table}] {name} is the default"
            assert any(line.startswith(f"{name} = ") and "  # " in line for line in text.splitlines()), name
    explained = json.loads(command("explain", "--json").out)
    assert (explained["warnings"], explained["max_steps"], explained["reward_type"]) == ([], 70, "match")
    assert command("audit").code == 0
    again = command(*TINY, "tasks.jsonl")
    assert (again.code, again.out, codes_in(again.err)) == (2, "", ["init.file-exists"])


def test_a_hub_model_that_is_not_here_and_worked_solutions(command: Command, put: Put, tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "solution": rf"Surely $\boxed{{\frac{{{n}}}{{7}}}}$."} for n in range(1, 31)]
    put("data/tasks.jsonl", [*rows, rows[0], {"question": "?", "solution": "nothing"}])
    done = command("init", "--model", "Qwen/Qwen3-0.6B", "--data", "data/tasks.jsonl", *OPTIONS)
    assert done.code == 0
    told = json.loads(done.out)
    columns = {"prompt_key": "question", "answer_key": "solution", "options": {"extract": "boxed"}}
    assert told["data"] == {"source": "files", "path": "data/tasks.jsonl", **columns}
    assert (told["examples"], told["held_out"], told["rewards"]) == (30, 6, ["match"])
    assert told["shown"][0]["prompt"] == "1?\nPut your final answer in \\boxed{}."
    assert told["shown"][0]["perfect"]["read"] == told["shown"][0]["reference"] == r"\frac{1}{7}"
    assert any("1 duplicates dropped" in note for note in told["notes"])
    assert any("1 rows left out: no reference answer" in note for note in told["notes"])
    assert "prompts are shown without its chat template" in told["warnings"][0]
    content = written(tmp_path)
    assert (content["model"]["model"], content["training"]["max_steps"]) == ("Qwen/Qwen3-0.6B", 7)
    assert content["data"]["options"] == {"extract": "boxed"}
    assert command("explain").code == 0


def test_a_reward_that_cannot_score_the_data_is_refused(command: Command, put: Put, tmp_path: Path) -> None:
    put("tasks.jsonl", SUMS[:30])
    (tmp_path / "bad.py").write_text("def score(example, text):\n    return 1.0\n")
    done = command(*TINY, "tasks.jsonl", "--reward", "bad.py")
    assert (done.code, (tmp_path / "retrain.toml").exists()) == (1, False)
    assert "an empty answer is correct" in done.err
    (tmp_path / "good.py").write_text("def right(example, text):\n    return float(text == example.reference)\n")
    done = command(*TINY, "tasks.jsonl", "--reward", "good.py:right")
    assert done.code == 0, done.err
    assert written(tmp_path)["reward"] == {"type": "custom", "custom_module": "good.py", "custom_function": "right"}
    assert "score 1" in done.out


@pytest.mark.long
def test_a_folder_of_splits_with_hostile_names_and_content(command: Command, put: Put, tmp_path: Path) -> None:
    name = "./a\n[training]\nmax_steps = 1 #"
    rows = [{"question": f"\x1b[2J{n} apples?", "answer": f"Count.\n#### \x1b]0;{n}"} for n in range(9)]
    put(f"{name}/train.jsonl", rows)
    put(f"{name}/test.jsonl", rows[:1])
    done = command(*TINY, name, "--reward", "match", "--log-dir", "logs/here")
    assert done.code == 0, done.err
    assert "\x1b" not in done.out
    assert "9 examples to train on, 0 held out" in done.out
    assert "warning: 9 examples are too few to hold some out" in done.out
    content = written(tmp_path)
    assert (content["data"]["path"], content["training"]["max_steps"]) == (name, 70)
    assert content["data"]["options"] == {"split": "train", "extract": "hashes"}
    assert content["logging"] == {"log_dir": "logs/here"}
    assert "eval" not in content


def test_what_is_written_for_a_source_by_name() -> None:
    plugins = load_plugins({})
    formulas = DataChoice(settings={"source": "arithmetic"}, reward="math")
    text = configuration_text(Wishes(data="arithmetic", reward="match"), formulas, plugins, examples=1000)
    content = tomllib.loads(text)
    assert (content["data"], content["reward"]) == ({"source": "arithmetic"}, {"type": "match"})  # instead of its own
    assert content["eval"] == {"every": 20, "examples": 64}
    copy = choose_data(Wishes(data=f"gsm8k:{Path.cwd()}", split="test"), plugins)
    assert copy.settings == {"source": "gsm8k", "path": str(Path.cwd()), "options": {"split": "test"}}
    judged = tomllib.loads(configuration_text(Wishes(data="arithmetic", reward="judge:gpt-4.1"), copy, plugins))
    assert judged["reward"] == {"type": "judge", "judge_model": "gpt-4.1"}
    gym = choose_data(Wishes(data="reasoning_gym:chain_sum"), plugins)
    assert gym.settings == {"source": "reasoning_gym", "options": {"name": "chain_sum"}}
    content = tomllib.loads(configuration_text(Wishes(data="reasoning_gym:chain_sum"), gym, plugins))
    assert "reward" not in content
    assert content["logging"] == {"log_dir": "logs/chain_sum"}
    choice = DataChoice(settings={"source": "files", "path": "p.jsonl"})
    wishes = Wishes(model="builtin:tiny", data="p.jsonl", reward="code")  # which reads programs
    told = tomllib.loads(configuration_text(wishes, choice, plugins))["data"]["instruction"]
    assert told == "Put your whole program into one ```python block."


REFUSED = [  # the places, and the codes of `init` itself
    (("--data", "task.jsonl"), "'tasks.jsonl'", ""),
    (("--data", "nobody/nothing"), "nobody/nothing", "init.data-not-here"),
    (("--data", "gsm8k"), "openai/gsm8k", ""),  # the name, not the folder
    (("--data", "mixed"), "mixed/b.jsonl", ""),
    (("--data", "bad.jsonl"), "bad.jsonl:2", ""),
    (("--data", "empty.jsonl"), "--data empty.jsonl", "data.empty"),
    (("--data", "reasoning_gym"), "--data reasoning_gym:NAME", "init.source-needs-value"),
    (("--data", "arithmetic:hard"), "arithmetic:hard", "init.source-takes-no-value"),
    (("--data", "tasks.jsonl", "--reward", "mtach"), "'match'", ""),
    (("--data", "tasks.jsonl", "--prompt-key", "promt"), "'promt'", ""),
    (("--data", "tasks.jsonl", "-t", "tiny"), "--template", "usage.bad-arguments"),
    (("--model", "builtin:tiny"), "--data FILE", "usage.bad-arguments"),
    (("--data", "tasks.jsonl", "--model", "./nowhere"), "./nowhere", ""),
]


@pytest.mark.parametrize(("arguments", "place", "code"), REFUSED)
def test_what_cannot_be_used_is_one_clear_error(
    command: Command, put: Put, tmp_path: Path, arguments: tuple[str, ...], place: str, code: str
) -> None:
    put("tasks.jsonl", SUMS[:3])
    put("gsm8k/train.jsonl", SUMS[:3])
    put("mixed/a.jsonl", SUMS[:3])
    put("mixed/b.jsonl", [{"question": "q", "reply": "1"}])
    put("bad.jsonl", SUMS[:1]).open("a").write("{'prompt': __import__('os').system('touch ran')}\n")
    put("empty.jsonl", [])
    done = command("init", *arguments)
    assert (done.code, done.out) == (2, "")
    assert (place in done.err, code in ["", *codes_in(done.err)]) == (True, True), done.err
    assert "/tmp" not in done.err
    assert not [name for name in ("retrain.toml", "ran") if (tmp_path / name).exists()]


USER = {"role": "user", "content": "What is 2 + 2?"}
LONG = "A train leaves at nine and arrives at noon. How long does it take?"
FOUND: list[tuple[Mapping[str, Any], tuple[str, str, Mapping[str, Any]]]] = [
    ({"prompt": "q", "answer": "1"}, ("prompt", "answer", {})),
    ({"id": 7, "Question": "q", "Final Answer": 1}, ("Question", "Final Answer", {})),
    ({"problem": "p", "solution": "long", "answer": "1"}, ("problem", "answer", {})),
    ({"problem": "p", "solution": r"so \boxed{1}"}, ("problem", "solution", {"extract": "boxed"})),
    ({"question": "q", "answer": "2+2\n#### 4"}, ("question", "answer", {"extract": "hashes"})),
    ({"a": LONG, "b": 3}, ("a", "b", {})),
    ({"story": LONG, "hint": "h", "label": "3"}, ("story", "label", {})),
    (
        {"prompt": [USER], "reward_model": {"ground_truth": "4", "style": "rule"}},
        ("prompt", "reward_model.ground_truth", {}),
    ),
    ({"data": {"question": "q", "answer": "1"}}, ("data.question", "data.answer", {})),
    ({"messages": [USER], "answer": "4"}, ("messages", "answer", {})),
    ({"messages": [USER, {"role": "assistant", "content": "4"}]}, ("messages", "", {"answer_in_chat": True})),
    (
        {"messages": [USER, {"role": "assistant", "content": r"\boxed{4}"}]},
        ("messages", "", {"answer_in_chat": True, "extract": "boxed"}),
    ),
]
UNSURE = [
    ("prompt", {"a": "short text", "b": "other text", "answer": "1"}),
    ("answer", {"prompt": "q", "x": "1", "y": "2"}),
    ("answer", {"prompt": "q"}),
    ("answer", {"prompt": "q", "answer": [1]}),
    ("prompt", {"prompt": 3, "answer": 1}),
    ("prompt", {}),
]


def found(row: Mapping[str, Any], **given: str) -> Columns:
    return find_columns([row] * 3, where="--data x", **given)


@pytest.mark.parametrize(("row", "expected"), FOUND)
def test_columns_are_found(row: Mapping[str, Any], expected: tuple[str, str, Mapping[str, Any]]) -> None:
    columns = found(row)
    assert (columns.prompt, columns.answer, columns.options) == expected


@pytest.mark.parametrize(("column", "row"), UNSURE)
def test_where_rows_do_not_decide_the_flag_that_does_is_named(column: str, row: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        found(row)
    (problem,) = caught.value.problems
    assert (problem.code, f"--{column}-key" in problem.fix) == (f"data.{column}-column-unclear", True)
    assert all(f"{name} (" in problem.why for name in row)


def test_what_is_given_is_taken() -> None:
    row = {"prompt": "q", "answer": "1", "other": LONG, "gold": "2"}
    columns = found(row, prompt="other", answer="gold")
    assert (columns.prompt, columns.answer) == ("other", "gold")
    assert columns.told == ("prompt: column 'other' (--prompt-key)", "answer: column 'gold' (--answer-key)")
    assert found(row).told[1] == "answer: column 'answer' (by its name); 'gold' would do as well: --answer-key decides"


def test_a_programs_tests_may_be_lists_and_objects_and_a_solution_may_stand_beside_them() -> None:
    pairs: dict[str, Any] = {"inputs": ["1"], "outputs": ["2"]}
    for row, answer, tests in (
        ({"prompt": "q", "answer": "print(1)", "tests": ["assert f() == 1"]}, "answer", "tests"),
        ({"question": "q", "input_output": pairs, "solution": "def f(): ..."}, "solution", "input_output"),
        ({"prompt": "q", "info": {"test_cases": [pairs]}, "id": 3}, "info.test_cases", "info.test_cases"),
    ):
        columns = find_columns([row], where="x", by_tests=True)
        assert (columns.answer, columns.tests, columns.options) == (answer, tests, {})
    assert refused(find_columns, [{"prompt": "q", "answer": "a"}], where="x", by_tests=True) == [
        "data.answer-column-unclear"
    ]


def test_of_many_columns_some_are_listed_without_control_characters() -> None:
    with pytest.raises(ConfigError, match=r"c18 .*, 81 more") as caught:
        found({"\x1b[2J": "\x1b[31m" * 9} | {f"c{number}": number for number in range(100)})
    assert ("c20" in str(caught.value), "\x1b" in str(caught.value)) == (False, False)
    answers = {r"\pi": True, "1/2": True, "7": False, "cat": False}
    assert {answer: found({"prompt": "q", "answer": answer}).has_formulas for answer in answers} == answers
