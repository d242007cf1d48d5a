"""`retrain init-plugin --distribution`: what it writes, what it asks, and that a failure leaves nothing behind."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from retrain.cli.command_line import run
from retrain.cli.scaffold.init_plugin_command import LICENSES
from retrain.cli.scaffold.render import KINDS, slug


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # other tests of this process had one


def tree(folder: Path) -> list[str]:
    """Everything below a folder, hidden files too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_it_says_the_next_two_commands_and_the_toml(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init-plugin", "--distribution", "--name", "Entropy Floor"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Wrote ./entropy-floor: transform 'entropy_floor'. Next:",
        '  pip install -e "./entropy-floor[dev]"',
        "  pytest ./entropy-floor",
        "Then name it in your TOML:",
        "  [algorithm]",
        '  transform_mode = "entropy_floor"',
        "  transform_params = { floor = 0.5 }",
    ]


def test_json_alone_is_written_with_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["init-plugin", "--distribution", "--name", "my-reward", "-k", "reward", "-o", "some/where", "--json"]) == 0
    )
    content = json.loads(capsys.readouterr().out)
    assert content["kind"] == "reward"
    assert content["folder"] == "some/where/my-reward"
    assert "src/my_reward/reward.py" in content["files"]
    assert tomllib.loads(content["toml"]) == {"reward": {"type": "my_reward", "params": {"tolerance": 1e-6}}}
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {
        f"some/where/my-reward/{file}" for file in content["files"]
    }


@pytest.mark.parametrize("kind", [slug(kind) for kind in KINDS])
def test_every_project_is_whole_and_holds_no_trace_of_the_template(kind: str, tmp_path: Path) -> None:
    assert (
        run(
            [
                "init-plugin",
                "--distribution",
                "--name",
                "retrain-my-part",
                "--kind",
                kind,
                "--author",
                "Zoë O'Neil",
                "--no-input",
            ]
        )
        == 0
    )
    project = tmp_path / "retrain-my-part"
    for name in ("LICENSE", "README.md", ".gitignore", ".github/workflows/ci.yml", "src/retrain_my_part/py.typed"):
        assert (project / name).is_file()
    for file in project.rglob("*"):
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        assert "cookiecutter" not in text, file
        assert "{%" not in text, file
        assert all(len(line) <= 120 for line in text.splitlines() if file.suffix != ".md"), file
    meta = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert meta["authors"] == [{"name": "Zoë O'Neil"}]
    assert meta["entry-points"] == {"retrain": {"retrain_my_part": "retrain_my_part.plugin"}}
    example = tomllib.loads((project / "example.toml").read_text(encoding="utf-8"))
    assert "my_part" in str(example)
    assert example["model"]["model"] == "builtin:tiny"


@pytest.mark.parametrize("licence", LICENSES)
def test_the_licence_is_the_chosen_one(licence: str, tmp_path: Path) -> None:
    assert (
        run(["init-plugin", "--distribution", "--name", "mine", "--license", licence, "--author", "Ada", "--no-input"])
        == 0
    )
    first = {"Apache-2.0": "Apache License", "MIT": "MIT License", "BSD-3-Clause": "BSD 3-Clause License"}[licence]
    text = (tmp_path / "mine/LICENSE").read_text(encoding="utf-8")
    assert text.strip().startswith(first)
    assert ("Ada" in text) == (licence != "Apache-2.0")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--name", "../x"], "is a path, not a name"),
        (["--name", "class"], "is a Python keyword"),
        (["--name", "json"], "a module of the standard library"),
        (["--name", ""], "an empty name"),
        (["--name", "x" * 300], "has 300 characters"),
        (["--name", "grpo", "--kind", "advantage"], "retrain-sepa 0.1.0 provides it"),
        (["--name", "mine", "--kind", "transfrom"], "did you mean 'transform'?"),
        (["--name", "mine", "--kind", "quux"], "use one of: advantage, transform"),
        (["--name", "mine", "--author", "{{ 7 * 7 }}"], "is not allowed here"),
        (["--name", "mine", "--description", 'a "quoted" word'], "is not allowed here"),
        ([], "a name is needed"),
    ],
)
def test_a_wrong_command_line_is_told_and_nothing_is_written(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["init-plugin", "--distribution", *arguments, "--no-input"]) == 2
    shown = capsys.readouterr().err
    assert told in shown
    assert "fix:" in shown
    assert tree(tmp_path) == []


@pytest.mark.parametrize("kind", ["planning", "data", "inference", "Data Source", "planning_detector"])
def test_other_spellings_of_a_kind_are_understood(kind: str, tmp_path: Path) -> None:
    assert run(["init-plugin", "--distribution", "--name", "mine", "--kind", kind, "--no-input"]) == 0
    assert (tmp_path / "mine").is_dir()


@pytest.mark.parametrize("is_link", [False, True])
def test_what_exists_is_left_alone(is_link: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if is_link:
        (tmp_path / "mine").symlink_to("nowhere")
    else:
        (tmp_path / "mine").mkdir()
    before = tree(tmp_path)
    assert run(["init-plugin", "--distribution", "--name", "mine", "--no-input"]) == 2
    assert "exists already; nothing was written" in capsys.readouterr().err
    assert tree(tmp_path) == before


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert run(["init-plugin", "--distribution", "--name", "mine", "-o", "file/below", "--no-input"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert tree(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert run(["init-plugin", "--distribution", "--name", "mine", "-o", "closed", "--no-input"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert tree(closed) == []


def test_nothing_is_left_when_rendering_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("retrain.cli.scaffold.render.shutil.copytree", broken)
    assert run(["init-plugin", "--distribution", "--name", "mine", "-o", "deep/er", "--no-input"]) == 130
    assert tree(tmp_path) == []


def test_the_home_folder_is_left_alone(tmp_path: Path) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (home / ".cookiecutterrc").write_text("default_context: {author: Somebody Else, kind: reward}", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "retrain",
        "init-plugin",
        "--distribution",
        "--name",
        "mine",
        "--no-input",
        "--author",
        "Ada",
    ]
    done = subprocess.run(command, cwd=work, env={**os.environ, "HOME": str(home)}, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert tree(home) == [".cookiecutterrc"]
    assert 'authors = [{ name = "Ada" }]' in (work / "mine/pyproject.toml").read_text(encoding="utf-8")


def test_on_a_terminal_it_asks(tmp_path: Path) -> None:
    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "retrain", "init-plugin", "--distribution"]
    process = subprocess.Popen(command, cwd=tmp_path, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    os.write(main, b"reward\nclose-enough\nAn own description.\nAda\n")
    shown = b""
    while True:
        try:
            shown += os.read(main, 4096)
        except OSError:  # Linux: the other end is closed
            break
        if process.poll() is not None and b"[reward]" in shown:
            break
    os.close(main)
    assert process.wait(60) == 0, shown.decode()
    for word in (b"Kind [transform]", b"Name", b"Description [", b"Author ["):
        assert word in shown
    text = (tmp_path / "close-enough/pyproject.toml").read_text(encoding="utf-8")
    assert 'description = "An own description."' in text
    assert '"Ada"' in text
