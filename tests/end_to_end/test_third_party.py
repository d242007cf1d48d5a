"""A stranger's plugin beside our wheels: made, built, installed, trained with, upgraded, uninstalled."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Installation
from tests.end_to_end.running import records

TOML = """
[model]
model = "builtin:tiny"
lora_rank = 4
[backend]
devices = "cpu"
[algorithm]
transform_mode = "NAME"
[algorithm.transform_params]
PARAMS
[data]
source = "arithmetic"
[training]
seed = 1
max_steps = 3
batch_size = 2
group_size = 4
max_tokens = 24
lr = 0.003
temperature = 1.0
save_every = 0
"""


class Stranger:
    """Somebody with a plugin distribution called my-floor, made by the installed wheel."""

    def __init__(self, installation: Installation, work: Path) -> None:
        self.installation, self.work, self.project = installation, work, work / "my-floor"
        made = installation.retrain(
            "init-plugin", "--distribution", "--name", "my-floor", "--kind", "transform", "--no-input", folder=work
        )
        assert made.returncode == 0, made.stderr

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.project / file
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{file} has no {old!r}"
        path.write_text(text.replace(old, new), encoding="utf-8")

    def install(self) -> None:
        """Build the wheel, and put it in the place of what was installed before."""
        folder = self.project / "dist"
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(build, cwd=self.project, check=True, capture_output=True, timeout=60)
        if (self.installation.ours / "my_floor").exists():
            self.installation.uninstall("my-floor")
        with zipfile.ZipFile(max(folder.glob("*.whl"))) as wheel:
            wheel.extractall(self.installation.ours)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.installation.retrain(*arguments, folder=self.work)

    def inventory(self) -> dict[str, list[dict[str, str]]]:
        content = json.loads(self.run("plugins", "--json").stdout)
        return {"transforms": content["kinds"]["transform"], "failures": content["failures"]}


@pytest.fixture
def stranger(installation: Installation, work: Path) -> Stranger:
    return Stranger(installation, work)


def configured(toml: Callable[[str], str], name: str, params: str = "") -> None:
    toml(TOML.replace("NAME", name).replace("PARAMS", params))


@pytest.mark.slow
def test_installed_trained_with_upgraded_and_uninstalled(stranger: Stranger, toml: Callable[[str], str]) -> None:
    stranger.install()
    rows = {row["name"]: row for row in stranger.inventory()["transforms"]}
    assert (rows["my_floor"]["distribution"], rows["my_floor"]["version"]) == ("my-floor", "0.1.0")

    configured(toml, "my_floor", "floor = 1.0")
    done = stranger.run("--log-dir", "logs/first")
    assert done.returncode == 0, done.stderr
    lines = records(stranger.work / "logs/first/metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert {line["condition"] for line in lines} == {"maxrl+my_floor"}
    assert all(line["floor_lifted_frac"] > 0.2 for line in lines if line.get("loss"))
    assert '"my-floor": "0.1.0"' in (stranger.work / "logs/first/run.json").read_text(encoding="utf-8")

    stranger.edit("pyproject.toml", 'version = "0.1.0"', 'version = "0.2.0"')
    stranger.edit("src/my_floor/transform.py", "    floor: float =", "    lowest_share: float =")
    stranger.edit("src/my_floor/transform.py", "(ctx.params).floor", "(ctx.params).lowest_share")
    stranger.install()
    assert {row["version"] for row in stranger.inventory()["transforms"] if row["name"] == "my_floor"} == {"0.2.0"}
    refused = stranger.run("explain")
    assert refused.returncode == 2
    assert "unknown option 'floor'" in refused.stderr
    assert "known: lowest_share" in refused.stderr
    configured(toml, "my_floor", "lowest_share = 0.0")
    done = stranger.run("--log-dir", "logs/second")
    assert done.returncode == 0, done.stderr
    assert '"my-floor": "0.2.0"' in (stranger.work / "logs/second/run.json").read_text(encoding="utf-8")

    stranger.installation.uninstall("my-floor")
    missing = stranger.run()
    assert missing.returncode == 2
    assert "retrain.toml:8 [algorithm] transform_mode: no transform named 'my_floor'" in missing.stderr
    assert "known transform names: gtpo (retrain-sepa 0.1.0)" in missing.stderr
    assert "Traceback" not in missing.stderr
