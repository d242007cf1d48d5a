"""`retrain init-plugin`, as one file or a distribution: names, what it writes and asks; a failure leaves nothing."""

from __future__ import annotations

import json
import keyword
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.cli.scaffold.render import KINDS, MAX_CHARS, names_from, plain_text, slug
from retrain.kernel.errors import ConfigError
from tests.end_to_end.terminal import converse
from tests.kit.problems import codes_in

Command = Callable[..., Any]
WHOLE = ("init-plugin", "--distribution", "--no-input")
FORMS = (WHOLE, ("init-plugin", "-k", "reward"))


@pytest.fixture(autouse=True)
def _other_tests_of_this_process_had_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mine", raising=False)


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or path.is_file())


def test_the_next_commands_and_toml_are_printed(command: Command) -> None:
    result = command("init-plugin", "--distribution", "--name", "Entropy Floor")
    assert (result.code, result.out.splitlines()) == (
        0,
        [
            "Wrote ./entropy-floor: transform 'entropy_floor'. Next:",
            '  pip install -e "./entropy-floor[dev]"',
            "  pytest ./entropy-floor",
            "Then name it in your TOML:",
            "  [algorithm]",
            '  transform_mode = "entropy_floor"',
            "  transform_params = { floor = 0.5 }",
        ],
    )


@pytest.mark.parametrize(
    ("form", "selected", "file"),
    [
        (WHOLE, "close", "lab/parts/close/src/close/reward.py"),
        (FORMS[1], "lab.parts.close.PLUGIN", "lab/parts/close.py"),
    ],
)
def test_json_names_every_file_and_the_toml(
    form: Sequence[str], selected: str, file: str, command: Command, tmp_path: Path
) -> None:
    content = json.loads(command(*form, "-k", "reward", "-n", "close", "-o", "lab/parts", "--json").out)
    below = f"{content['folder']}/" if "folder" in content else ""
    assert sorted(f"{below}{each}" for each in content["files"]) == tree(tmp_path)
    assert file in tree(tmp_path)
    assert tomllib.loads(content["toml"]) == {"reward": {"type": selected, "params": {"tolerance": 1e-6}}}


@pytest.mark.parametrize("kind", [slug(kind) for kind in KINDS])
def test_every_project_is_whole_and_has_the_example_of_a_file(
    kind: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "user.name")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", 'Zoë "Z" O\'Neil')
    assert command(*WHOLE, "--name", "retrain-my-part", "--kind", kind).code == 0
    project = tmp_path / "retrain-my-part"
    assert {"LICENSE", "README.md", ".gitignore", ".github/workflows/ci.yml"} < set(tree(project))
    for file in project.rglob("*"):
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        assert not [mark for mark in ("cookiecutter", "{%") if mark in text], file
        assert all(len(line) <= 120 for line in text.splitlines() if file.suffix != ".md"), file
    meta = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert meta["authors"] == [{"name": "Zoë Z O'Neil"}]
    assert meta["entry-points"] == {"retrain": {"retrain_my_part": "retrain_my_part.plugin"}}
    example = tomllib.loads((project / "example.toml").read_text(encoding="utf-8"))
    assert ("my_part" in str(example), example["model"]["model"]) == (True, "builtin:tiny")
    assert command("init-plugin", "--kind", kind, "--name", "my_part", "--json").code == 0
    own = (tmp_path / "plugins/my_part.py").read_text(encoding="utf-8").splitlines()
    package = project / "src/retrain_my_part"
    assert (package / "py.typed").is_file()
    for line in (package / f"{kind.replace('-', '_')}.py").read_text(encoding="utf-8").splitlines():
        assert line in own or line.startswith("from retrain.api import")


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        ((*WHOLE, "--name", "../x"), "plugin.name-is-path", ""),
        ((*FORMS[1], "--name", "../x"), "plugin.name-is-path", ""),
        ((*WHOLE, "--name", "grpo", "--kind", "advantage"), "plugin.name-taken", "retrain-sepa 0.1.0"),
        ((*WHOLE, "--name", "nll", "--kind", "uncertainty"), "plugin.name-taken", "retrain-sepa"),  # an alias
        ((*FORMS[1], "-n", "numpy"), "plugin.name-taken", "numpy/__init__.py"),
        ((*WHOLE, "--name", "mine", "--kind", "transfrom"), "plugin.unknown-kind", "'transform'"),
        ((*WHOLE, "--name", "mine", "--kind", "quux"), "plugin.unknown-kind", "advantage, transform"),
        ((*FORMS[1], "-n", "mine", "-o", "../outside"), "plugin.folder-not-importable", "--output-dir"),
        ((*FORMS[1], "-n", "mine", "-o", "my-plugins"), "plugin.folder-not-importable", "--output-dir"),
        (WHOLE, "usage.bad-arguments", "--name"),
        (FORMS[1], "usage.bad-arguments", "--name"),
    ],
)
def test_a_wrong_command_line_is_refused_and_nothing_is_written(
    arguments: Sequence[str], code: str, named: str, command: Command, tmp_path: Path
) -> None:
    result = command(*arguments)
    assert (result.code, codes_in(result.err), named in result.err) == (2, [code], True)
    assert list(tmp_path.iterdir()) == []
    # a name of another kind is free, and other spellings of a kind are understood
    if "grpo" in arguments:
        assert command(*WHOLE, "--name", "grpo", "--kind", "Data Source").code == 0


@pytest.mark.parametrize(
    ("form", "existing"),
    [(WHOLE, "mine"), (WHOLE, "mine/x"), (FORMS[1], "plugins/mine.py"), (FORMS[1], "tests/test_mine_plugin.py")],
)
def test_nothing_is_overwritten(form: Sequence[str], existing: str, command: Command, tmp_path: Path) -> None:
    (tmp_path / existing).parent.mkdir(exist_ok=True)
    if existing == "mine":
        (tmp_path / existing).symlink_to("nowhere")
    else:
        (tmp_path / existing).write_text("precious")
    result = command(*form, "--name", "mine", *(["--with-test"] if form is not WHOLE else []))
    assert (result.code, codes_in(result.err), tree(tmp_path)) == (2, ["plugin.name-taken"], [existing])
    assert existing == "mine" or (tmp_path / existing).read_text() == "precious"


@pytest.mark.parametrize(
    ("form", "file"), [((*WHOLE, "-o", "file/below"), "file"), ((*FORMS[1], "--with-test"), "tests")]
)
def test_a_folder_that_cannot_be_written_gets_nothing_and_its_sister_neither(
    form: Sequence[str], file: str, command: Command, tmp_path: Path
) -> None:
    (tmp_path / file).write_text("no folder")
    result = command(*form, "--name", "mine")
    assert (result.code, codes_in(result.err), tree(tmp_path)) == (2, ["plugin.unwritable"], [file])


def test_nothing_left_when_rendering_fails(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("retrain.cli.scaffold.render.shutil.copytree", broken)
    assert command(*WHOLE, "--name", "mine", "-o", "deep/er").code == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        ("own_parts.py", "own-parts"),
        ("own_parts/__init__.py", "own-parts"),
        ("own_parts/score.py", "own-parts"),
        ("plugins/own_parts/__init__.py", "own_parts"),
        ("lab/own_parts.py", "own_parts"),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_a_name_that_a_file_here_has_is_refused_with_the_file_and_a_free_name(
    form: Sequence[str], holder: str, name: str, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "retrain.toml").write_text('[plugins]\nsearch_paths = ["lab", "plugins"]\n')
    for file in (holder, "my_own_parts.py"):  # the second one is taken too
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    before = tree(tmp_path)
    result = command(*form, "-n", name)
    assert (result.code, codes_in(result.err), tree(tmp_path)) == (2, ["plugin.name-taken"], before)
    assert holder.removesuffix("/score.py") in result.err
    assert "my-own-parts-2 is free" in result.err
    assert command(*form, "-n", "my-own-parts-2").code == 0


def test_on_a_terminal_it_asks_and_leaves_the_home_folder_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".cookiecutterrc").write_text("default_context: {author: Another Name, kind: loss}", encoding="utf-8")
    argv = [sys.executable, "-m", "retrain", "init-plugin", "--distribution"]
    answers = (("Kind [transform]", "reward\n"), ("Name", "close-enough\n"), ("[reward]", ""))
    code, shown = converse(argv, answers, cwd=tmp_path, environ={"HOME": str(home)})
    assert (code, tree(home)) == (0, [".cookiecutterrc"]), shown
    text = (tmp_path / "close-enough/pyproject.toml").read_text(encoding="utf-8")
    assert 'description = "1 when the number' in text
    assert "Another Name" not in text


@pytest.mark.parametrize(
    ("text", "distribution", "module", "part"),
    [
        ("entropy-floor", "entropy-floor", "entropy_floor", "entropy_floor"),
        ("Entropy Floor", "entropy-floor", "entropy_floor", "entropy_floor"),
        ("EntropyFloor", "entropy-floor", "entropy_floor", "entropy_floor"),
        ("retrain-entropy-floor", "retrain-entropy-floor", "retrain_entropy_floor", "entropy_floor"),
        ("  top_k.2 ", "top-k-2", "top_k_2", "top_k_2"),
        ("Übermut", "ubermut", "ubermut", "ubermut"),
    ],
)
def test_a_name_becomes_three(text: str, distribution: str, module: str, part: str) -> None:
    names = names_from(text, where="NAME")
    assert (names.distribution, names.module, names.part) == (distribution, module, part)


REFUSED = {
    "plugin.name-empty": ("", "   "),
    "plugin.name-not-importable": ("---", "2fast", "{{ 7 * 7 }}"),
    "plugin.name-is-path": ("../x", "/etc/passwd", "a\\b", ".hidden"),
    "plugin.name-reserved": ("class", "retrain-class", "json", "retrain-json", "retrain"),
    "plugin.name-not-ascii": ("数学", "маth"),
    "plugin.name-too-long": ("x" * 300,),
}


@pytest.mark.parametrize(("code", "text"), [(code, text) for code, texts in REFUSED.items() for text in texts])
def test_what_is_no_name_is_refused_with_a_fix(code: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        names_from(text, where="NAME")
    (problem,) = caught.value.problems
    assert (problem.code, problem.where, bool(problem.fix)) == (code, "NAME", True)


@given(st.text(max_size=60))
def test_every_text_is_refused_or_gives_names_that_can_be_used(text: str) -> None:
    try:
        names = names_from(text, where="NAME")
    except ConfigError:
        return
    assert len(names.distribution) <= 2 * MAX_CHARS
    assert names.module.replace("_", "-") == names.distribution
    for name in (names.module, names.part):
        assert name.isascii()
        assert name.isidentifier()
        assert name == name.lower()
        assert not keyword.iskeyword(name)
        assert name not in sys.stdlib_module_names


@pytest.mark.parametrize("text", ['say "hi"', "back\\slash", "{{ 7 * 7 }}", "two\nlines", "\x1b[31m", "line\u2028end"])
def test_a_name_cannot_break_a_file(text: str) -> None:
    assert tomllib.loads(f'name = "{plain_text(text)}"')["name"].isprintable()
    assert "{" not in plain_text(text)
    assert plain_text("  Zoë  O'Neil 🎉 <zoe@example.org> ") == "Zoë O'Neil 🎉 <zoe@example.org>"
