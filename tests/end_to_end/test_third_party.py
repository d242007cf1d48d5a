"""A stranger's plugin beside our wheels: made, built, installed, trained with, upgraded, uninstalled; and broken."""

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
from tests.kit.shared import slow_or_long

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
Edits = tuple[tuple[str, str, str], ...]


class Stranger:
    """Somebody with a plugin distribution called my-floor, made by the installed wheel."""

    def __init__(self, installation: Installation, work: Path) -> None:
        self.installation, self.work, self.project = installation, work, work / "my-floor"
        made = installation.retrain(
            "init-plugin", "--distribution", "--name", "my-floor", "--kind", "transform", "--no-input", folder=work
        )
        assert made.returncode == 0, made.stderr

    def edit(self, file: str, old: str, new: str) -> None:
        """Change a file of the project; fails when there is nothing to change."""
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
        """A `retrain` command in the folder with the TOML."""
        return self.installation.retrain(*arguments, folder=self.work)

    def inventory(self) -> dict[str, list[dict[str, str]]]:
        """The transforms and the failures that `retrain plugins` knows."""
        content = json.loads(self.run("plugins", "--json").stdout)
        return {"transforms": content["kinds"]["transform"], "failures": content["failures"]}


@pytest.fixture
def stranger(installation: Installation, work: Path) -> Stranger:
    """Their project, not installed yet."""
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


BROKEN: dict[str, tuple[Edits, str]] = {
    "import error": (
        (("src/my_floor/plugin.py", "@hookimpl", "import libquantum\n\n\n@hookimpl"),),
        "ModuleNotFoundError: No module named 'libquantum'",
    ),
    "wrong hook signature": ((("src/my_floor/plugin.py", "transforms(register:", "transforms(wrong:"),), "{'wrong'}"),
    "too old": (
        (("pyproject.toml", "retrain-core>=0.1.0,<0.2", "retrain-core<0.1"),),
        "it requires retrain-core <0.1, and this is 0.1.0; fix: pip install --upgrade my-floor",
    ),
    "too new": (
        (("pyproject.toml", "retrain-core>=0.1.0,<0.2", "retrain_core[ray] >= 9.0"),),
        ">=9.0, and this is 0.1.0",
    ),
}


@pytest.mark.parametrize("fault", slow_or_long(BROKEN, "import error"))
def test_a_broken_plugin_is_named_with_its_fault_and_harms_nobody_else(
    fault: str, stranger: Stranger, toml: Callable[[str], str]
) -> None:
    before = stranger.inventory()
    edits, told = BROKEN[fault]
    for edit in edits:
        stranger.edit(*edit)
    stranger.install()

    after = stranger.inventory()
    assert after["transforms"] == before["transforms"]
    (failure,) = after["failures"]
    assert failure["distribution"] == "my-floor 0.1.0"
    assert told in failure["error"]
    assert told in stranger.run("plugins").stdout

    configured(toml, "my_floor")
    refused = stranger.run()
    assert refused.returncode == 2
    assert "no transform named 'my_floor'" in refused.stderr
    assert "failed to load: my-floor 0.1.0" in refused.stderr
    assert told in refused.stderr
    assert "Traceback" not in refused.stderr
    configured(toml, "gtpo")
    assert stranger.run("explain").returncode == 0


@pytest.mark.long
def test_a_part_that_breaks_when_it_is_asked_for_is_told_with_its_owner(
    stranger: Stranger, toml: Callable[[str], str]
) -> None:
    stranger.edit("src/my_floor/transform.py", "import numpy as np", "import numpy as np\nimport libquantum")
    stranger.install()
    assert stranger.inventory()["failures"] == [], "nothing of it is imported before it is asked for"
    configured(toml, "my_floor")
    refused = stranger.run("explain")
    assert refused.returncode == 2
    assert "transform 'my_floor' of my-floor 0.1.0 failed to load: ModuleNotFoundError" in refused.stderr
    assert "Traceback" not in refused.stderr
