"""Data sets by id, local or cached: splits, subsets, filters, presets; every source passes the audit of a run."""

import json
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from retrain.api import Config, ConfigError, Kind, PluginContext, Seeds, resolve
from retrain.kernel.contracts.tasks import TimedScore
from retrain.tasks.audit.probes import gold_of
from retrain.tasks.audit.verifier_audit import audit
from retrain.tasks.scoring.verdict import verdict
from retrain_rewards.sources.files import split_of
from retrain_rewards.sources.table_source import extracted
from retrain_rewards.tables import RewardTable
from retrain_rewards.verifiers.math_reward import make_math
from tests.kit.problems import codes_in, refused
from tests.kit.shared import first_or_long
from tests.kit.tables import cells

GSM8K = [
    {"question": "How many?", "answer": "She has <<3*4=12>>12.\n#### 12"},
    {"question": "How much?", "answer": "It costs $1,250.\n#### 1,250"},
    {"question": "Why?", "answer": "no final answer"},
]
DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": f"{DAPO_HEAD}Find $n$.\nIt is even.{DAPO_TAIL}"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}


def task(number, **extra):
    return {"prompt": f"question {number}", "answer": str(number), **extra}


def put(root, files):
    """Write each file by its suffix; returns the folder."""
    for name, rows in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), file)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(root)


LAYOUTS = {
    "data/": ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000.parquet"],
    "top": ["train_a.jsonl", "train_b.jsonl", "test.jsonl"],
    "subset": ["main/train-0.parquet", "main/train-1.parquet", "main/test-0.parquet"],
    "a folder per split": ["train/a.jsonl", "train/b.jsonl", "test/a.jsonl"],
    "named": ["toy-train.1.jsonl", "toy-train.2.jsonl", "toy-dev.jsonl", "toy-test.jsonl"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_local_copy_gives_the_split_that_is_asked_for(load, tmp_path, layout):
    rows = {name: [task(number)] for number, name in enumerate(LAYOUTS[layout], start=1)}
    path = put(tmp_path, rows)
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    assert [e.reference for e in load("hub", path=path).examples] == ["1", "2"]
    assert [e.reference for e in load("hub", path=path, options={"split": "test"}).examples] == [str(len(rows))]
    assert refused(load, "hub", path=path, options={"split": "nope"}) == ["data.unknown-split"]
    if layout == "top":  # `files` reads all of them, sorted by name
        assert [e.reference for e in load("files", path=path).examples] == ["3", "1", "2"]
        assert [e.reference for e in load("files", path=path, options={"split": "train"}).examples] == ["1", "2"]
    names = {"train-00000-of-00001": "train", "gsm8k_test": "test", "dev": "validation", "training.2": "train"}
    assert {name: split_of(name) for name in names} == names
    assert [split_of(name) for name in ("trainer", "contest", "tasks", "")] == [""] * 4
    assert [refused(load, "hub", path=path) for path in ("", "tasks.jsonl")] == [["data.not-a-data-set"]] * 2
    (tmp_path / "empty").mkdir()
    assert refused(load, "hub", path=str(tmp_path / "empty")) == ["data.empty-folder"]
    path = put(tmp_path / "subsets", {"easy/train.jsonl": [task(1)], "hard/train.jsonl": [task(2)]})
    assert refused(load, "hub", path=path) == ["data.several-subsets"]
    for source in ("hub", "files"):
        assert [e.reference for e in load(source, path=path, options={"subset": "hard"}).examples] == ["2"]
    assert refused(load, "hub", path=path, options={"subset": "harder"}) == ["data.unknown-subset"]


def test_what_save_to_disk_wrote(load, tmp_path):
    import datasets

    train, test = (datasets.Dataset.from_list([task(n)]) for n in (1, 2))
    train.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=train, test=test).save_to_disk(str(tmp_path / "both"))
    for source in ("files", "hub"):
        assert [e.reference for e in load(source, path=str(tmp_path / "one")).examples] == ["1"]
        loaded = load(source, path=str(tmp_path / "both"), options={"split": "test"})
        assert [e.reference for e in loaded.examples] == ["2"]
    assert refused(load, "hub", path=str(tmp_path / "both"), options={"split": "dev"}) == ["data.unknown-split"]


def test_rows_are_chosen_by_the_values_of_columns(load, tmp_path):
    rows = [task(1, level=4, kind={"name": "x"}), task(2, level=5, kind={"name": "y"}), task(3, level=6, kind=None)]
    path = put(tmp_path, {"t.jsonl": rows})
    chosen = load("files", path=path, options={"where": {"level": [5, "6"], "kind.name": "y"}})
    assert [e.reference for e in chosen.examples] == ["2"]
    assert any("2 rows left out: not chosen by [data.options] where (first:" in note for note in chosen.notes)
    path = put(tmp_path, {"a.jsonl": [task(1)], "b.parquet": [{"question": "q", "solution": "1"}]})
    with pytest.raises(ConfigError) as caught:
        load("files", path=path)
    told = str(caught.value)
    assert codes_in(caught)[0] == "data.mixed-columns"
    assert len(codes_in(caught)) == 3
    assert str(tmp_path / "b.parquet") in told
    assert str(tmp_path / "a.jsonl") in told


def test_answers_inside_columns_chats_and_solutions(load, tmp_path):
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": r"It is \boxed{4}."}]
    path = put(tmp_path, {"t.jsonl": [{"messages": chat, "gold": {"answer": "four"}}]})
    options = {"answer_in_chat": True, "extract": "boxed"}
    from_chat = load("files", path=path, prompt_key="messages", options=options).examples[0]
    assert ([dict(m) for m in from_chat.prompt], from_chat.reference) == (chat[:1], "4")
    assert from_chat.info == {"gold": {"answer": "four"}}
    put(tmp_path, {"t.jsonl": [{"q": {"text": "2 + 2?"}, "gold": {"answer": 4}}]})
    nested = load("files", path=path, prompt_key="q.text", answer_key="gold.answer").examples[0]
    assert (nested.prompt, nested.reference) == ("2 + 2?", "4")
    for text, how, answer in (
        ("a #### b\n#### 1,234,567.5 ", "hashes", "1234567.5"),
        *(("(1, 2)", "whole", "(1, 2)"), (r"\boxed{1}, no, \boxed{2}", "boxed", "2")),
        *(("none of it", how, "") for how in ("hashes", "boxed")),
    ):
        assert extracted(text, how) == answer
    assert refused(load, "files", path=path, prompt_key="q.text", options=options) == ["data.chat-without-answer"]


def test_presets_read_the_layouts_of_their_data_sets(load, tmp_path):
    hub = put(tmp_path / "hub", {"main/train-00000-of-00001.parquet": GSM8K, "socratic/train-0.parquet": [task(1)]})
    github = put(tmp_path / "github", {"train.jsonl": GSM8K, "test.jsonl": GSM8K[:1]})
    for path in (hub, github):
        loaded = load("gsm8k", path=path)
        assert [(e.prompt, e.reference) for e in loaded.examples] == [("How many?", "12"), ("How much?", "1250")]
        assert loaded.examples[0].info == {"answer": GSM8K[0]["answer"]}  # the solution, for a warm start
        assert "gsm8k: 1 rows left out: no reference answer" in loaded.notes[1]
    assert len(load("gsm8k", path=github, options={"split": "test"}).examples) == 1
    changed = put(tmp_path / "changed", {"train.jsonl": [{"problem": "q", "result": "#### 1"}]})
    assert load("gsm8k", path=changed, prompt_key="problem", answer_key="result").examples[0].reference == "1"
    path = put(tmp_path, {"data/dapo-math-17k.parquet": [DAPO, DAPO]})
    loaded = load("dapo-math", path=path)
    assert [(e.prompt, e.reference) for e in loaded.examples] == [("Find $n$.\nIt is even.", "34")]
    assert "dapo-math: 1 duplicates dropped" in loaded.notes
    row = {"problem": "Find $x$.", "answer": r"\frac{1}{2}", "solution": "long"}
    (example,) = load("deepscaler", path=put(tmp_path / "deep", {"deepscaler.json": [row]})).examples
    assert (example.prompt, example.reference) == ("Find $x$.", r"\frac{1}{2}")


def test_countdown_asks_for_an_expression_and_brings_its_verifier(load, tmp_path):
    path = put(tmp_path, {"data/train-00000-of-00001.parquet": [{"target": 98, "nums": [44, 19, 35]}]})
    loaded = load("countdown", path=path)
    example = loaded.examples[0]
    assert (example.reference, example.info) == ("", {"target": 98, "nums": [44, 19, 35]})
    assert "44, 19, 35" in str(example.prompt)
    assert loaded.reward.score(example, r"\boxed{44 + 19 + 35}").value == 1.0
    for nums, target in (([1, "2"], 3), ([], 3), ([1] * 9, 9), ([1, 2], None), ("12", 3)):
        put(tmp_path / "bad", {"t.jsonl": [{"nums": nums, "target": target}]})
        assert refused(load, "countdown", path=str(tmp_path / "bad")) == ["data.not-a-puzzle"]
    rows = [{"nums": [44, 19, 35], "target": 98}, {"nums": [3, 3, 8, 8], "target": 24}, {"nums": [1, 2], "target": 99}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    loaded = load("countdown", path=str(tmp_path))
    report = audited(loaded.reward, loaded.examples)
    assert not report.findings
    assert (report.gold_correct, report.gold_unknown) == (2, 1)  # nobody can make 99 of 1 and 2


@pytest.fixture
def cached_toy(tmp_path, monkeypatch):
    """The cache of `datasets` holds org/toy, and nothing else can be reached."""
    import datasets

    put(tmp_path, {"toy.jsonl": [task(1), task(2)]})
    file, cache = str(tmp_path / "toy.jsonl"), tmp_path / "datasets"
    builder = datasets.load_dataset_builder("json", data_files=file, cache_dir=str(tmp_path / "c"))
    builder.download_and_prepare()
    cached = cache / "org___toy" / "default" / "0.0.0" / "0123456789abcdef"
    cached.parent.mkdir(parents=True)
    Path(builder.cache_dir).rename(cached)
    for arrow in cached.glob("*.arrow"):
        arrow.rename(cached / "toy-train.arrow")
    info = json.loads((cached / "dataset_info.json").read_text())
    info |= {"dataset_name": "toy", "config_name": "default", "builder_name": "parquet"}
    info["splits"]["train"]["dataset_name"] = "toy"
    (cached / "dataset_info.json").write_text(json.dumps(info))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")


@pytest.mark.usefixtures("cached_toy")
@pytest.mark.parametrize("is_offline", [False, True])
def test_a_data_set_that_was_downloaded_is_read_without_the_hub(load, monkeypatch, is_offline):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", is_offline)
    assert [e.reference for e in load("hub", path="org/toy").examples] == ["1", "2"]
    for path, options in (("org/toy", {"subset": "other"}), ("org/other", {"revision": "abc"})):
        with pytest.raises(ConfigError) as caught:
            load("hub", path=path, options=options)
        assert codes_in(caught) == ["data.hub-unavailable"]
        assert ("HF_HUB_OFFLINE" if is_offline else "http://127.0.0.1:9") in caught.value.problems[0].why
    assert datasets.config.HF_HUB_OFFLINE is is_offline


ANSWERS = cells(r"""
    \frac{1}{2}  -3  0  1  2\sqrt{3}  \left(-\infty, 2\right]  (3, -1)  x^2 - 4x + 1
    \begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}  10\%  \$18.50  \text{(C)}  12,345  \frac{\pi}{6}  60^\circ
    \{1, 2, 3\}
""")


def audited(reward, examples, limit=16):
    """As a run does it, but in this process; the prompt stands in a chat."""

    def scorer(pairs):
        scores = []
        for example, text in pairs:
            started = time.perf_counter()
            score = verdict(reward.score(example, text))
            scores.append(TimedScore(score=score, seconds=time.perf_counter() - started))
        return scores

    def rendered(example):
        return f"user\n{example.prompt}\nPut your final answer in \\boxed{{}}.\nassistant\n"

    return audit(examples, scorer, limit=limit, gold=gold_of([reward]), rendered=rendered)


@pytest.fixture
def make(plugins):
    """`make("match")`: a reward of this distribution with its default settings."""

    def build(name):
        found = resolve(plugins, Kind.REWARD, name, where="test")
        reward = found.target(PluginContext(config=Config(tables={}), seeds=Seeds(0), plugins=plugins))
        prepare = getattr(reward, "prepare", None)
        if prepare is not None:
            prepare()
        return reward

    return build


@pytest.fixture
def math_folder(tmp_path):
    rows = [
        {"problem": f"Problem {i}: find it.", "solution": rf"It is $\boxed{{{a}}}$."} for i, a in enumerate(ANSWERS)
    ]
    (tmp_path / "geometry.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("reward", first_or_long(["match", "math"]))
@pytest.mark.parametrize("source", first_or_long(["arithmetic", "math", "files"]))
def test_match_and_math_on_the_sources(load, make, math_folder, source, reward):
    tasks = {"prompt": "Which number follows 6?", "answer": 7}, {"prompt": "And 007?", "answer": "008"}
    (math_folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    given = {
        "arithmetic": {},
        "math": {"path": str(math_folder), "options": {"subjects": ["geometry"]}},
        "files": {"path": str(math_folder / "tasks.jsonl")},
    }[source]
    report = audited(make(reward), load(source, **given).examples)
    assert not report.findings
    assert report.gold_correct == report.examples


def test_math_verify_alone_is_stopped(load, plugins):
    tables = {"reward": RewardTable.model_validate({"strict": False})}
    reward = make_math(PluginContext(config=Config(tables=tables), seeds=Seeds(0), plugins=plugins))
    reward.prepare()
    report = audited(reward, load("arithmetic").examples, limit=2)
    errors = {finding.check for finding in report.errors}
    assert errors >= {"restated", "hedged", "negated"}
    assert report.gold_correct == 2


@pytest.mark.usefixtures("one_entries_process")
@pytest.mark.parametrize("name", ["chain_sum", "intermediate_integration", "graph_color"])
@pytest.mark.slow
def test_reasoning_gym_with_its_own_verifiers(load, name):
    loaded = load("reasoning_gym", options={"name": name, "size": 24})
    report = audited(loaded.reward, loaded.examples)
    assert not report.findings
    assert report.gold_unknown == (16 if name == "graph_color" else 0)
