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
from tests.kit.shared import first_or_long

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


@pytest.mark.slow
@pytest.mark.long
def test_their_tests_pass(lab: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=lab,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.long
def test_a_test_passes_from_any_folder(lab: Path, tmp_path: Path) -> None:
    file = lab / "tests/test_my_transform_plugin.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout


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


@pytest.mark.slow
def test_an_algorithm_and_an_environment_are_selected_from_toml(lab: Path) -> None:
    line = trained(
        lab,
        MODEL + '[algorithm]\nalgorithm_mode = "my_algorithm.SPEC"\n[environment]\n'
        'provider = "my_environment.create"\nargs = { highest = 3, tasks = 3 }\nmax_turns = 2\n',
    )
    assert line["condition"] == "my_algorithm"


@pytest.mark.long
def test_a_planning_detector_is_selected_from_toml(lab: Path) -> None:
    line = trained(
        lab,
        MODEL + '[algorithm]\ntransform_mode = "gtpo_hicra"\n[planning]\n'
        'detector = "my_planning_detector.PLUGIN"\n[data]\nsource = "arithmetic"\n',
    )
    assert line["condition"] == "maxrl+gtpo_hicra"


@pytest.mark.slow
def test_a_backend_is_selected_from_toml(lab: Path) -> None:
    toml = '[model]\nmodel = "builtin:tiny"\n[backend]\nbackend = "my_backend.PLUGIN"\noptions = { step_size = 0.1 }\n'
    line = trained(lab, toml + '[data]\nsource = "arithmetic"\n')
    assert line["step"] == 0
    written = tomllib.loads((lab / "logs/run/config.toml").read_text(encoding="utf-8"))
    assert written["backend"]["backend"] == "my_backend.PLUGIN"


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


@pytest.mark.parametrize(
    ("toml", "told"),
    first_or_long(
        [
            ('[algorithm]\ntransform_mode = "my_transform.PLUGIN"\ntransform_params = { flor = 0.5 }\n', "use 'floor'"),
            (
                '[algorithm]\ntransform_mode = "my_transform.PLUGIN"\ntransform_params = { floor = 2 }\n',
                "less than or equal",
            ),
            ('[data]\nsource = "my_data_source.PLUGIN"\noptions = { digit = 1 }\n', "use 'digits'"),
            ('[backend]\nbackend = "my_backend.PLUGIN"\noptions = { step_size = -1.0 }\n', "greater than 0"),
        ]
    ),
)
def test_parameters_of_a_single_file_are_checked_like_those_of_a_distribution(lab: Path, toml: str, told: str) -> None:
    file = lab / "wrong.toml"
    file.write_text(toml + ("" if "[data]" in toml else '[data]\nsource = "arithmetic"\n'), encoding="utf-8")
    outcome = retrain("wrong.toml", "--model", "builtin:tiny", "--max-steps", "1", cwd=lab)
    assert outcome.code == 2
    assert told in outcome.err
    assert "Traceback" not in outcome.err
