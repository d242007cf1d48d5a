"""`retrain init-plugin` for every kind: the file works through `[plugins] search_paths`, its test passes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from retrain.cli.command_line import run
from retrain.cli.scaffold.render import KINDS, slug
from tests.end_to_end.running import records, retrain
from tests.kit.shared import slow_or_long

MODEL = '[model]\nmodel = "builtin:tiny"\nlora_rank = 4\n[backend]\ndevices = "cpu"\n'
SHORT = (
    *("--max-steps", "1", "--batch-size", "2", "--group-size", "4", "--max-tokens", "24", "--seed", "1"),
    *("--lr", "0.003", "--temperature", "1.0", "--save-every", "0", "--log-dir", "logs/run"),
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the one-file form of every kind, and its tests."""
    folder = tmp_path_factory.mktemp("lab")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for kind in map(slug, KINDS):
            assert run(["init-plugin", "--kind", kind, "--name", f"my-{kind}", "--with-test"]) == 0
    return folder


def trained(lab: Path, toml: str, *arguments: str) -> dict[str, object]:
    """Train as the TOML says; the last line of its metrics."""
    file = lab / f"{abs(hash(toml))}.toml"
    file.write_text(toml, encoding="utf-8")
    outcome = retrain(file.name, *SHORT, *arguments, cwd=lab)
    assert outcome.code == 0, outcome.err
    return records(lab / "logs/run/metrics.jsonl")[-1]


@pytest.mark.long
def test_their_tests_pass_from_any_folder(lab: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(lab / "tests")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout[-5000:]


def test_the_parts_of_a_run_are_selected_from_toml(lab: Path) -> None:
    line = trained(
        lab,
        MODEL + '[algorithm]\nadvantage_mode = "my_advantage.leave_one_out"\n'
        'transform_mode = "my_transform.PLUGIN"\ntransform_params = { floor = 1.0 }\n'
        'uncertainty_kind = "my_uncertainty.SPEC"\n'
        '[data]\nsource = "my_data_source.PLUGIN"\noptions = { digits = 1, size = 45 }\n'
        'sampler = "my_sampler.PLUGIN"\nsampler_params = { floor = 0.5 }\n'
        '[reward]\ntype = "my_reward.PLUGIN"\n[inference]\nengine = "my_inference_engine.PLUGIN"\n'
        '[logging]\nrecorders = ["my_recorder.create"]\n',
    )
    assert line["condition"] == "my_advantage.leave_one_out+my_transform"
    assert line["sampler"] == "my_sampler.PLUGIN"
    assert float(str(line["floor_lifted_frac"])) > 0.2
    with (lab / "logs/run/metrics.csv").open(encoding="utf-8") as stream:
        rows = {(row["step"], row["metric"]): float(row["value"]) for row in csv.DictReader(stream)}
    assert rows["0", "loss"] == line["loss"]


@pytest.mark.parametrize(
    ("toml", "key", "value"),
    slow_or_long(
        [
            (
                MODEL + '[algorithm]\nalgorithm_mode = "my_algorithm.SPEC"\n[environment]\n'
                'provider = "my_environment.create"\nargs = { highest = 3, tasks = 3 }\nmax_turns = 2\n',
                "condition",
                "my_algorithm",
            ),
            (
                MODEL + '[algorithm]\ntransform_mode = "gtpo_hicra"\n[planning]\n'
                'detector = "my_planning_detector.PLUGIN"\n[data]\nsource = "arithmetic"\n',
                "condition",
                "maxrl+gtpo_hicra",
            ),
            (
                '[model]\nmodel = "builtin:tiny"\n[backend]\nbackend = "my_backend.PLUGIN"\n'
                'options = { step_size = 0.1 }\n[data]\nsource = "arithmetic"\n',
                "step",
                0,
            ),
        ]
    ),
    ids=["algorithm and environment", "planning detector", "backend"],
)
def test_other_parts_are_selected_from_toml(lab: Path, toml: str, key: str, value: object) -> None:
    assert trained(lab, toml)[key] == value
    used = tomllib.loads((lab / "logs/run/config.toml").read_text(encoding="utf-8"))["backend"]["backend"]
    assert used == ("my_backend.PLUGIN" if "my_backend" in toml else "local")


@pytest.mark.long
def test_a_launcher_is_selected_from_toml(lab: Path) -> None:
    campaign = (
        '[campaign]\nlauncher = "my_launcher.PLUGIN"\nlauncher_options = { nice = 1 }\nseeds = [1]\nmax_steps = 1\n'
        'conditions = [{ advantage_mode = "grpo", transform_mode = "none" }]\n[data]\nsource = "arithmetic"\n'
        "[training]\nbatch_size = 2\ngroup_size = 4\nmax_tokens = 24\nsave_every = 0\n"
        '[logging]\nlog_dir = "logs/campaign"\n'
    )
    (lab / "campaign.toml").write_text(MODEL + campaign, encoding="utf-8")
    outcome = retrain("campaign.toml", cwd=lab)
    assert outcome.code == 0, outcome.err
    manifest = json.loads((lab / "logs/campaign/manifest.json").read_text(encoding="utf-8"))
    assert manifest["launcher"] == "my_launcher.PLUGIN"
