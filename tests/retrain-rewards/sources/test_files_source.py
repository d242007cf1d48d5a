"""Tasks from files, from the folders of MATH, and from made-up arithmetic."""

import decimal
import json
import os
import re
import subprocess
import sys
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.api import ConfigError
from retrain_rewards.sources.arithmetic import count_pairs, pair, shares
from tests.kit.problems import codes_in, refused
from tests.kit.shared import first_or_long
from tests.kit.tables import pairs


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def task(number, **extra):
    return {"prompt": f"question {number}", "answer": str(number), **extra}


def test_jsonl_and_csv_keep_text_and_numbers_as_written(load, write, tmp_path):
    answers = "2024-01-01", "007", 7, 8.5, 10**30
    rows = [task(number, answer=answer) for number, answer in enumerate(answers, start=1)]
    loaded = load("files", path=write("t.jsonl", lines(*rows)))
    assert [e.reference for e in loaded.examples] == ["2024-01-01", "007", "7", "8.5", "1" + "0" * 30]
    assert [e.prompt for e in loaded.examples] == [f"question {n}" for n in range(1, 6)]
    assert loaded.reward is None
    assert loaded.notes[0].startswith("files: 5 rows from")
    long, separated = "x" * 2_000_000, "a\u2028b\x85c"
    text = json.dumps(task(1, prompt=separated), ensure_ascii=False) + "\r\n\n" + json.dumps(task(2, prompt=long))
    assert [e.prompt for e in load("files", path=write("t.jsonl", text)).examples] == [separated, long]
    assert load("files", path=write("t.csv", f"prompt,answer\n{long},1\n")).examples[0].prompt == long
    for text in (json.dumps([task(1)], indent=1), lines(task(1)), json.dumps(task(1), indent=1)):
        assert [e.reference for e in load("files", path=write("t.json", text)).examples] == ["1"]
    text = '\ufeffprompt,answer,level\n"two\nlines, and a comma",007,1\nb,1.50,2\nc,NA,3\nd,,4\n'
    loaded = load("files", path=write("t.csv", text))
    assert [e.reference for e in loaded.examples] == ["007", "1.50", "NA"]
    assert loaded.examples[0].prompt == "two\nlines, and a comma"
    assert loaded.examples[0].info == {"level": "1"}
    assert any(
        "1 rows left out: no reference answer: empty (first:" in note and "row 4" in note for note in loaded.notes
    )
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    table = pa.table({"q": [chat, chat], "a": [1, 2], "tags": [["x"], None]})
    pq.write_table(table, tmp_path / "t.parquet")
    loaded = load("files", path=str(tmp_path / "t.parquet"), prompt_key="q", answer_key="a")
    assert [e.reference for e in loaded.examples] == ["1", "2"]
    assert [dict(m) for m in loaded.examples[0].prompt] == chat
    assert loaded.examples[0].info == {"tags": ["x"]}
    answers = [decimal.Decimal("1.50"), decimal.Decimal("-0.05")]
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": answers}), tmp_path / "t.parquet")
    assert [e.reference for e in load("files", path=str(tmp_path / "t.parquet")).examples] == ["1.50", "-0.05"]


def test_folder_pattern_and_file_give_the_same_ids(load, write, tmp_path):
    write("set [1]/a.jsonl", lines(task(1)))
    write("set [1]/b.csv", "prompt,answer\nquestion 2,2\n")
    write("set [1]/README.md", "not data")
    folder = load("files", path=str(tmp_path / "set [1]"))
    pattern = load("files", path=str(tmp_path / "*" / "a.jsonl"))
    assert [e.reference for e in folder.examples] == ["1", "2"]
    assert pattern.examples[0].id == folder.examples[0].id
    one = load("files", path=write("one.jsonl", lines(task(1, level=3), task(2), task(1, level=3))))
    other = load("files", path=write("x/other.jsonl", lines(task(2), task(1))))
    assert {e.id for e in one.examples} == {e.id for e in other.examples}
    assert "files: 1 duplicates dropped" in one.notes
    changed = load("files", path=write("c.jsonl", lines(task(1, answer="other"))))
    assert changed.examples[0].id not in {e.id for e in one.examples}
    for name in ("t.jsonl", "t.csv", "t.json"):
        (tmp_path / name).write_bytes(b'{"prompt": "\xff", "answer": "1"}')
        code = "data.bad-header" if name == "t.csv" else "data.not-text"
        assert refused(load, "files", path=str(tmp_path / name)) == [code]


def test_rows_without_prompt_or_reference_are_left_out_and_counted(load, write):
    blank = [{"role": "system", "content": ""}, {"role": "user", "content": " \u200b"}]
    rows = [task(1), task(2, answer=""), task(3, answer=None), {"prompt": "q"}, task(5, prompt=" "), task(6, prompt=[])]
    rows += [task(7, answer=float("nan")), task(8, answer="\x00"), task(9, answer="\u200b\n"), task(10, prompt=blank)]
    loaded = load("files", path=write("t.jsonl", lines(*rows)))
    assert [e.reference for e in loaded.examples] == ["1"]
    notes = "\n".join(loaded.notes)
    assert re.search(r"3 rows left out: no reference answer: empty \(first: .*t.jsonl:2\)", notes)
    assert re.search(r"2 rows left out: no reference answer: null \(first: .*t.jsonl:3\)", notes)
    assert re.search(r"1 rows left out: no reference answer: NaN \(first: .*t.jsonl:7\)", notes)
    assert "3 rows left out: no prompt" in notes
    rows = [task(1), {"prompt": "question 1", "answer": "2"}, {"prompt": "question 1", "answer": "3"}, task(2), task(2)]
    loaded = load("files", path=write("s.jsonl", lines(*rows)))
    (note,) = [note for note in loaded.notes if "several references" in note]
    assert (len(loaded.examples), note.endswith("s.jsonl:2)")) == (4, True)
    assert note.startswith("files: 1 prompts have several references (first: ")


def chat(*messages):
    return lines(task(1, prompt=messages))


BAD_FILES = [
    ("t.jsonl", lines(task(1)) + '\n{"prompt": "b", "answer"\n', "data.bad-json", ":3"),
    ("t.jsonl", lines(task(1), [1, 2]), "data.row-not-object", ":2"),
    *(("t.jsonl", lines(task(1), task(2, answer=each)), "data.bad-reference", ":2") for each in ([1], True)),
    ("t.jsonl", '{"prompt": "a", "answer": Infinity}', "data.bad-reference", ":1"),
    ("t.jsonl", lines(task(1, prompt=5)), "data.bad-prompt", ":1"),
    ("t.jsonl", chat({"role": "robot", "content": "x"}), "data.unknown-role", ":1"),
    ("t.jsonl", chat({"role": "user"}), "data.bad-message", ":1"),
    ("t.jsonl", chat("x"), "data.bad-message", ":1"),
    ("t.jsonl", chat({"role": "assistant", "content": "x"}), "data.chat-last-role", ":1"),
    ("t.jsonl", lines(task(1, prompt="\ud800")), "data.bad-text", ":1"),
    ("t.jsonl", '{"a": ' * 100_000, "data.bad-json", ":1"),
    *(("t.jsonl", text, "data.no-tasks", "") for text in ("", "\n \n", lines(task(1, answer="")))),
    ("t.json", '[\n{"prompt": "a",\n"answer" "1"}]', "data.bad-json", ":3"),
    ("t.json", "[1]", "data.row-not-object", " row 1"),
    *((name, text, "data.no-tasks", "") for name, text in (("t.json", "[]"), ("t.csv", ""), ("t.parquet", ""))),
    ("t.csv", "prompt,answer\na,1\nb,1,2\n", "data.unreadable-table", ""),
    ("t.csv", "prompt,answer,answer\na,1,2\n", "data.column-twice", ":1"),
    ("t.csv", "prompt,answer\n", "data.no-tasks", ""),
    ("t.csv", "prompt;answer\na;1\n", "data.wrong-separator", ":1"),
    ("t.csv", 'prompt,answer\n"a,1\nb,2\n', "data.unreadable-table", ""),
    ("t.parquet", "junk", "data.unreadable-table", ""),
    ("t.txt", "x", "data.unknown-format", ""),
]


@pytest.mark.parametrize(("name", "text", "code", "place"), BAD_FILES)
def test_a_bad_file_is_one_clear_error(load, write, name, text, code, place, capfd):
    with pytest.raises(ConfigError) as caught:
        load("files", path=write(name, text))
    assert codes_in(caught) == [code]
    assert code == "data.no-tasks" or caught.value.problems[0].where.endswith(f"{name}{place}")
    assert capfd.readouterr().err == ""


MISSING = [
    ("t.jsonl", lines({"promt": "a", "answer": "1"}), {}, r"'prompt'.*'promt'"),
    ("t.jsonl", lines({"prompt": "a", "solution": "1"}), {}, r"'answer'.*prompt, solution"),
    ("t.csv", "promt,answer\na,1\n", {}, r"'prompt'.*'promt'"),
    (
        *("t.jsonl", lines({"prompt": "a", "reward_model": {"ground_truth": "1", "style": "rule"}})),
        *({"answer_key": "reward_model.truth"}, r"'reward_model.truth'.*reward_model.style.*ground_truth'"),
    ),
]


@pytest.mark.parametrize(("name", "text", "keys", "named"), MISSING)
def test_a_missing_column_is_named_with_those_that_exist(load, write, name, text, keys, named):
    with pytest.raises(ConfigError, match=rf"(?s)no column {named}"):
        load("files", path=write(name, text), **keys)
    assert refused(load, "files", path=write("p.jsonl", lines(task(1))), answer_key="prompt") == ["data.same-column"]


@pytest.mark.parametrize(
    ("path", "code"),
    pairs("""
         => data.no-path  task.jsonl => data.path-missing  nowhere/t.jsonl => data.path-missing
        *.parquet => data.path-missing  empty => data.empty-folder  https://example.org/t.jsonl => data.remote-path
    """),
)
def test_a_path_without_data_is_refused(load, write, tmp_path, path, code):
    write("tasks.jsonl", lines(task(1)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        load("files", path=path if not path or "://" in path else str(tmp_path / path))
    assert codes_in(caught) == [code]
    assert path != "task.jsonl" or "tasks.jsonl" in caught.value.problems[0].fix


def test_messages_key_names_chats_with_or_without_an_answer(load, write):
    ask = [{"role": "user", "content": "1 + 1?"}]
    answered = [*ask, {"role": "assistant", "content": "two"}]
    path = write("t.jsonl", lines({"log": {"turns": answered}}, {"log": {"turns": answered}, "answer": "2"}))
    loaded = load("files", path=path, messages_key="log.turns")
    assert [(list(e.prompt), e.reference) for e in loaded.examples] == [(ask, "two"), (ask, "2")]
    path = write("u.jsonl", lines({"chat": ask, "gold": 2}))
    assert load("files", path=path, messages_key="chat", answer_key="gold").examples[0].reference == "2"
    with pytest.raises(ConfigError, match=r"(?s)no column 'golf'.*chat, gold.*'gold'"):
        load("files", path=path, messages_key="chat", answer_key="golf")
    with pytest.raises(ConfigError) as caught:
        load("files", path=path, messages_key="chat", prompt_key="q")
    assert codes_in(caught) == ["data.two-prompts"]
    assert refused(load, "arithmetic", messages_key="chat") == ["data.unread-key"]


SUBJECTS = ["intermediate_algebra", "precalculus", "number_theory", "counting_and_probability", "geometry"]


def row(subject, number, solution=None):
    text = rf"Thus \boxed{{\frac{{{number}}}{{2}}}}." if solution is None else solution
    return {"problem": f"{subject} {number}?", "level": "Level 5", "type": subject.title(), "solution": text}


@pytest.fixture
def folder(tmp_path):
    """Each default subject in another of the accepted layouts, with a test split beside some."""
    root = tmp_path / "math"
    rows = {subject: [row(subject, 1), row(subject, 2)] for subject in SUBJECTS}
    for subject in SUBJECTS[:2]:
        (root / subject).mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows[subject]), root / subject / "train-00000-of-00001.parquet")
        pq.write_table(pa.Table.from_pylist([row(subject, 9)]), root / subject / "test-00000-of-00001.parquet")
    (root / SUBJECTS[2]).mkdir()
    (root / SUBJECTS[2] / "all.jsonl").write_text(lines(*rows[SUBJECTS[2]]))
    (root / f"{SUBJECTS[3]}.jsonl").write_text(lines(*rows[SUBJECTS[3]]))
    (root / "train").mkdir()
    (root / "train" / f"{SUBJECTS[4]}.jsonl").write_text(lines(*rows[SUBJECTS[4]]))
    return root


def test_a_local_folder_of_the_default_subjects(load, folder, tmp_path):
    loaded = load("math", path=str(folder))
    assert [e.task for e in loaded.examples] == [s for s in SUBJECTS for _ in range(2)]
    assert loaded.examples[0].reference == r"\frac{1}{2}"
    assert loaded.examples[0].prompt == "intermediate_algebra 1?"
    assert loaded.examples[0].info == {"level": "Level 5", "type": "Intermediate_Algebra"}
    assert loaded.notes[0].startswith("math: 10 rows from")
    loaded = load("math", path=str(folder), options={"subjects": "precalculus,intermediate_algebra", "split": "test"})
    assert [e.prompt for e in loaded.examples] == ["precalculus 9?", "intermediate_algebra 9?"]
    for options in ({"subject": ["geometry"]}, {"subjects": ["geometri"]}, {"subjects": []}, {"split": 3}):
        with pytest.raises(AssertionError, match="Problem"):
            load("math", options=options)
    rows = [row("geometry", number, text) for number, text in ((1, None), (2, "no"), (3, r"\boxed{}"), (4, r"\boxed{"))]
    (tmp_path / "geometry.jsonl").write_text(lines(*rows, row("geometry", 1)))
    loaded = load("math", path=str(tmp_path), options={"subjects": ["geometry"]})
    assert len(loaded.examples) == 1
    assert any("math: 3 rows left out: no reference answer: no box in the solution" in note for note in loaded.notes)
    assert "math: 1 duplicates dropped" in loaded.notes


@pytest.mark.parametrize(
    ("subject", "code"),
    [
        ("geometry", "data.subject-missing"),
        ("prealgebra", "data.no-tasks"),
        ("nowhere", "data.path-missing"),
        ("keys", "data.unread-key"),
    ],
)
def test_a_bad_folder_is_one_clear_error(load, tmp_path, subject, code):
    (tmp_path / "prealgebra.jsonl").write_text(lines(row("prealgebra", 1, "nothing boxed")))
    keys = {"prompt_key": "problem"} if subject == "keys" else {"options": {"subjects": [subject]}}
    if subject == "nowhere":
        keys = {}
    assert refused(load, "math", path=str(tmp_path / "nowhere" if subject == "nowhere" else tmp_path), **keys) == [code]


@pytest.mark.parametrize("environ", first_or_long([{}, {"HF_HUB_OFFLINE": "1"}, {"HF_DATASETS_OFFLINE": "1"}]))
def test_an_unreachable_hub_is_one_quick_error_without_retries(tmp_path, environ):
    code = (
        "from retrain_rewards.sources.rows import hub_rows\nfrom retrain.api import ConfigError\n"
        "try: list(hub_rows('EleutherAI/hendrycks_math', 'geometry', 'train', where=''))\n"
        "except ConfigError as error: print(error)"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", **environ}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert codes_in(done.stdout) == ["data.hub-unavailable"]
    assert ("offline mode is set" if environ else "no answer from http://127.0.0.1:9") in done.stdout
    assert "Retry" not in done.stderr


QUESTION = re.compile(r"What is (\d+) ([+*-]) (\d+)\?")


def test_the_home_task(load):
    loaded = load("arithmetic")
    assert len(loaded.examples) == 4000
    assert len({e.id for e in loaded.examples}) == 4000
    signs = Counter()
    for example in loaded.examples:
        match = QUESTION.fullmatch(example.prompt)
        assert match
        left, sign, right = int(match[1]), match[2], int(match[3])
        signs[sign] += 1
        assert example.reference == str({"+": left + right, "-": left - right, "*": left * right}[sign])
        assert max(left, right) < 100
        if sign == "*":
            low, high = sorted((left, right))
            assert 1 <= low <= 9
            assert 10 <= high <= 99
    assert max(signs.values()) - min(signs.values()) <= 1
    assert loaded.reward is None
    first, again, other = (load("arithmetic", options={"size": 300, "seed": seed}) for seed in (3, 3, 4))
    assert [e.id for e in first.examples] == [e.id for e in again.examples] != [e.id for e in other.examples]
    (example,) = load("arithmetic", options={"size": 1, "operations": ["+"]}).examples
    assert (example.prompt, example.reference) == ("What is 95 + 25?", "120")
    assert example.id == "arithmetic-fda1d51f9cd2f39d83d09a73", "ids are fixed for all time"
    assert Counter(QUESTION.fullmatch(e.prompt)[2] for e in loaded.examples[:300]) == {"+": 100, "-": 100, "*": 100}
    loaded = load("arithmetic", options={"size": 27, "operands": [7, 9]})
    problems = {QUESTION.fullmatch(example.prompt).groups() for example in loaded.examples}
    assert problems == {(left, sign, right) for left in "789" for sign in "+-*" for right in "789"}
    too_many = {"size": 10, "operands": [7, 9], "operations": ["+"]}, {"size": 282, "digits": 1}
    assert [refused(load, "arithmetic", options=options) for options in too_many] == [["data.size-too-large"]] * 2
    assert len({e.prompt for e in load("arithmetic", options={"size": 281, "digits": 1}).examples}) == 281
    assert refused(load, "arithmetic", path="tasks.jsonl", answer_key="solution") == ["data.unread-key"] * 2
    for digits, operations in ((1, "*,-"), (3, "+"), (6, ["+", "+"]), (6, "*")):
        loaded = load("arithmetic", options={"size": 80, "digits": digits, "operations": operations})
        assert len({example.prompt for example in loaded.examples}) == 80


@pytest.mark.parametrize(
    "options",
    [
        *({"size": 0}, {"sise": 5}, {"operations": ["/"]}, {"operations": []}, {"digits": 7}, {"seed": -1}),
        *({"size": "5"}, {"operands": [2]}, {"operands": [3, 2]}, {"operands": [-1, 2]}, {"operands": [0, 10**6]}),
        {"operands": [2, 12], "digits": 2},
    ],
)
def test_bad_options_are_refused(load, options):
    with pytest.raises(AssertionError, match="Problem"):
        load("arithmetic", options=options)


@given(st.sampled_from("+-*"), st.integers(1, 2))
def test_pairs_are_distinct(sign, digits):
    count = count_pairs(sign, digits)
    assert len({pair(sign, index, digits) for index in range(count)}) == count


@given(st.dictionaries(st.sampled_from("+-*"), st.integers(1, 50), min_size=1), st.data())
def test_shares_use_what_there_is(counts, data):
    size = data.draw(st.integers(1, sum(counts.values())))
    taken = shares(size, counts)
    assert sum(taken.values()) == size
    open_shares = [taken[sign] for sign in counts if taken[sign] < counts[sign]]
    assert all(taken[sign] <= counts[sign] for sign in counts)
    assert not open_shares or max(taken.values()) - min(open_shares) <= 1
