"""A change by one character to code, data or a variable that a run uses is found, and refuses its resume."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.records.identity.code import ALL, SECRET, UNSET, ImportGraph, variables_read
from tests.kit.shared import first_or_long

LOG = "logs/train"
SOURCE = """
from pathlib import Path
from retrain.api import Example, LoadedData

def make(context):
    return Lines()

class Lines:
    def load(self):
        lines = Path("unnamed").read_text().splitlines()
        return LoadedData(examples=tuple(Example(id=line, prompt=line, reference=line) for line in lines))
"""
EDITS = [
    ("mine/reward.py", "==", "!=", "mine/reward.py:12"),
    ("mine/helpers.py", "[0]", "[1]", "mine/helpers.py:2"),
    ("mine/transform.py", "a + 0.0", "a - 0.0", "mine/transform.py:5"),
    ("mine/advantage.py", "reward - mean", "mean - reward", "mine/advantage.py:3"),
    ("tasks.jsonl", "2 plus 3", "2 plus 9", "tasks.jsonl:12"),
    ("site/stopping.py", "step == 2", "step == 9", "site/stopping.py:8"),
]


def edit(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def manifest(tmp_path):
    return json.loads((tmp_path / LOG / "run.json").read_text())


def test_one_changed_character_is_refused_with_file_and_line_and_accepted_on_request(run, tmp_path):
    assert run().code == 75
    for name, old, new, _ in EDITS:
        edit(tmp_path / name, old, new)
    result = run("--resume", LOG)
    assert result.code == 2
    for *_, place in EDITS:
        assert place in result.err
    assert "'    return text.split()[0]" not in result.err
    assert "return text.split()[0] if text.split() else" in result.err
    assert "return text.split()[1] if text.split() else" in result.err
    assert "--resume-anyway" in result.err
    assert manifest(tmp_path)["status"] == "stopped"
    assert "resumes" not in manifest(tmp_path)
    check = run("status", LOG, "--resume")
    assert check.code == 1
    for *_, place in EDITS:
        assert place in check.out

    result = run("--resume", LOG, "--resume-anyway")
    assert result.code == 0, result.err
    (entry,) = manifest(tmp_path)["resumes"]
    assert entry["step"] == 2
    assert len(entry["accepted"]) == len(EDITS) + 1
    assert entry["accepted"][-1].startswith("the data source gives other examples")
    assert "mine/reward.py" in str(entry["accepted"])
    former = tmp_path / LOG / "inputs/until_step_2/code/mine/reward.py"
    assert "==" in former.read_text()
    assert "!=" in (tmp_path / LOG / "inputs/code/mine/reward.py").read_text()

    told = "resumed at step 2 although mine/reward.py:12 changed"
    edit(tmp_path / "mine/reward.py", "!=", "==")
    assert run("--log-dir", "logs/other").code == 0
    assert told in run("status", "logs").out
    assert told in run("status", LOG, "--resume", "--config", f"{LOG}/config.toml").out
    shown = run("diff", LOG, "logs/other").out
    assert f"A was {told}" in shown
    assert "code  mine/reward.py  differs" in shown
    for line in (
        "-        return Score.of(float(first_word(text) !=",
        "+        return Score.of(float(first_word(text) ==",
    ):
        assert line in shown


def test_what_even_resume_anyway_cannot_do_is_said_before_data_and_model_load(run, tmp_path):
    assert run("--transform-mode", "gtpo_sepa", "--sepa-steps", "5").code == 75
    result = run("--resume", LOG, "--sepa-steps", "9", "--resume-anyway")
    assert result.code == 2
    assert "[sepa] steps: is 9, but the checkpoint was made with 5" in result.err
    assert "--resume-anyway cannot change that" in result.err
    assert "Loading dataset" not in result.out + result.err
    text = (tmp_path / LOG / "config.toml").read_text()
    (tmp_path / "other.toml").write_text(text.replace("steps = 5\n", "steps = 9\n"))
    check = run("status", LOG, "--resume", "--config", "other.toml")
    assert check.code == 1
    assert "--resume-anyway cannot change that" in check.out


@pytest.mark.long
def test_other_examples_are_noticed_wherever_the_source_reads_them(run, tmp_path):
    (tmp_path / "mine/source.py").write_text(SOURCE)
    (tmp_path / "unnamed").write_text("1 plus 2 ?\n2 plus 3 ?\n3 plus 4 ?\n")
    assert run("--data-source", "mine.source.make", "--data-path", "").code == 75
    assert manifest(tmp_path)["examples"] | {"digest": ""} == {"train": 3, "held_out": 0, "digest": ""}
    edit(tmp_path / "unnamed", "3 plus 4 ?\n", "3 plus 5 ?\n")
    result = run("--resume", LOG)
    assert result.code == 2
    assert "other examples: 3 to train on, 0 held out as before, but prompts, references or order differ" in result.err
    edit(tmp_path / "unnamed", "3 plus 5 ?\n", "")
    assert "other examples: 3 to train on, 0 held out, and now 2 to train on, 0 held out" in run("--resume", LOG).err
    assert run("--resume", LOG, "--resume-anyway").code == 0
    assert "the data source gives other examples" in run("status", "logs").out


def test_a_changed_key_is_refused_with_its_file_and_line(run, tmp_path):
    assert run().code == 75
    text = (tmp_path / LOG / "config.toml").read_text()
    assert "[data.template_args]\n" in text
    (tmp_path / "mine.toml").write_text(text.replace("[data.template_args]\n", "[data.template_args]\nthinking = 1\n"))
    result = run("mine.toml", "--resume", LOG)
    assert result.code == 2
    assert "data.template_args was {} and is now {'thinking': 1} (mine.toml:" in result.err
    assert "[data] template_args)" in result.err


SOURCES = {
    "lab/__init__.py": "from lab.base import thing\n",
    "lab/base.py": "thing = 1\n",
    "lab/reward.py": '''"""Text that names lab.untouched and says: import nothing_of_ours"""
import os, lab.one as first, numpy
from lab import two, thing  # from lab import commented
from . import three
from .deep import (
    four,  # a comment with a )
    five as renamed,
)
from .deep.six import \\
    value
if True: import lab.seven
def score():
    from lab.eight import late
    import importlib
    importlib.import_module("lab.nine")
    __import__('lab.ten')
SPEC = PluginSpec(name="x", summary="", factory="lab.eleven:make")
from lab.missing import nothing
from .... import too_far
''',
    "lab/deep/__init__.py": "",
    "lab/deep/six.py": "from ..twelve import value\nfrom .. import reward\n",
    "loose/module.py": "from lab import thirteen\n",
    "lab/untouched.py": "",
}
NUMBERS = ("one", "two", "three", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen")


@pytest.fixture
def lab(tmp_path, monkeypatch):
    sources = SOURCES | {f"lab/{name}.py": "value = late = 1\n" for name in NUMBERS}
    sources |= {f"lab/deep/{name}.py": "" for name in ("four", "five")}
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def found(graph, root):
    return {os.path.relpath(module.file, root) for module in graph.found.values() if module.file}


def test_every_way_to_import_a_module_of_the_project_is_followed(lab):
    graph = ImportGraph()
    assert graph.add("lab.reward")
    inside = {"__init__", "base", "reward", *NUMBERS[:-1], "deep/__init__", "deep/four", "deep/five", "deep/six"}
    assert found(graph, lab) == {f"lab/{name}.py" for name in inside}
    assert graph.add("loose.module")  # a folder without __init__.py
    assert {"loose/module.py", "lab/thirteen.py"} <= found(graph, lab)
    assert [graph.found[name].inside for name in ("lab", "lab.deep.six", "loose.module")] == [
        *("lab/__init__.py", "lab/deep/six.py", "loose/module.py")
    ]


def test_installed_modules_are_not_the_project_and_neighbours_come_first(lab):
    graph = ImportGraph(foreign=frozenset({"lab"}))
    for name in ("json", "numpy.linalg", "sys", "nowhere", "lab.reward", "", "lab..one", "__main__"):
        assert not graph.add(name)
    assert graph.found == {}
    folder = lab / "rewards"
    folder.mkdir()
    (folder / "score.py").write_text("import base\nfrom lab import one\n")
    (folder / "base.py").write_text("")
    graph = ImportGraph()
    graph.add_file(folder / "score.py")
    assert {"rewards/score.py", "rewards/base.py", "lab/one.py"} <= found(graph, lab)


def test_sources_that_cannot_be_read_as_text_end_the_search_and_nothing_else(lab):
    (lab / "lab/one.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9\xff'\nfrom lab import thirteen\n")
    (lab / "lab/two.py").write_bytes(b"\0\x80" * 100)
    (lab / "lab/three.py").unlink()
    os.mkfifo(lab / "lab/three.py")  # opening it would wait for a writer
    (lab / "lab/seven.py").unlink()
    (lab / "lab/seven.py").symlink_to("seven.py")
    graph = ImportGraph()
    assert graph.add("lab.reward")
    assert {"lab/thirteen.py", "lab/two.py"} <= found(graph, lab)
    assert not {"lab/three.py", "lab/seven.py"} & found(graph, lab)
    graph.add_file(lab / "lab/three.py")


ENVIRON = {"BONUS": "0.25", "OTHER": "1", "SHLVL": "2", "SSH_TTY": "/dev/pts/0", "JUDGE_API_KEY": "planted-secret-123"}
BONUS = variables_read([b"import os\nos.environ['BONUS']"], ENVIRON)["BONUS"]


BY_NAME = (
    'import os\ndef score(): return float(os.environ["BONUS"])',
    'import os\nX = os.environ.get("BONUS", "0")',
    'from os import environ\nX = environ.setdefault("BONUS", "0")',
    'from os import getenv\nX = getenv("BONUS")',
    'import os as system\nX = system.getenv("BONUS", "0")',
    'import os\nNAME = "BONUS"\ndef score(): return os.environ[NAME]',
    'import os\nX = "BONUS" in os.environ',
    "import os\nX = os.environb[b'BONUS']",
)
ANY = (
    "import os\nX = [os.environ[name] for name in ('BO' + 'NUS',)]",
    "import os\nX = dict(os.environ)",
    "import os\nX = getattr(os, 'environ')",
    "from os import getenv as read\nX = read('BONUS')",
    "import os\nX = os.path.expandvars('$BONUS')",
    "X = open('/proc/self/environ').read()",
    "import os\nX = os.environ[",
)


@pytest.mark.parametrize("source", [*BY_NAME, *ANY])
def test_a_literal_name_is_read_and_all_variables_where_names_are_unknown(source):
    found = variables_read([source.encode()], ENVIRON)
    if source in ANY:
        assert found.pop(ALL) == ALL
        assert found.keys() == {"BONUS", "OTHER", "JUDGE_API_KEY"}
        assert "planted" not in str(found)
        assert (found["JUDGE_API_KEY"], found["BONUS"]) == (SECRET, BONUS)
    else:
        assert found == {"BONUS": BONUS}
        assert variables_read([source.encode()], {}) == {"BONUS": UNSET}
    assert "0.25" not in str(found)


def test_what_is_only_written_or_mentioned_is_not_read():
    source = b'"""Reads no environ, nor getenv."""\nimport os\nos.environ["X"] = "1"  # environ["BONUS"]\n'
    assert variables_read([source], ENVIRON) == {}


@settings(max_examples=40)
@given(st.text(alphabet="os.environgetv[]()'\"=,: \n\\x00é", max_size=60))
def test_any_text_can_be_read(text):
    assert isinstance(variables_read([f"environ{text}".encode()], ENVIRON), dict)


@pytest.mark.parametrize("is_resumed", first_or_long([True, False]))
def test_a_changed_variable_is_named_by_compare_without_its_value(is_resumed, run, project, monkeypatch):
    helpers = project / "mine/helpers.py"
    helpers.write_text(f"import os\nBONUS = os.environ.get('MY_BONUS', 'none')\n{helpers.read_text()}")
    monkeypatch.setenv("MY_BONUS", "unspeakable-1")
    if not is_resumed:
        (project / "stop").unlink()
    assert run("--log-dir", "logs/a").code == (75 if is_resumed else 0)
    monkeypatch.setenv("MY_BONUS", "unspeakable-2")
    if is_resumed:
        assert run("--resume", "logs/a").code == 0
    assert run("--log-dir", "logs/b", "--seed", "2").code == 0
    told = json.loads(run("compare", "logs/a", "logs/b", "--json").out)["undeclared"]
    words = "resumed at step 2 although environment variable MY_BONUS changed" if is_resumed else "MY_BONUS changed"
    assert any(words in line for line in told), told
    files = (file for file in (project / "logs").rglob("*") if file.is_file())
    assert not [file for file in files if b"unspeakable" in file.read_bytes()]
