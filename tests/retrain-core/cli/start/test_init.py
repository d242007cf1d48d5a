"""`retrain init`: templates load, nothing is overwritten, and a first run fits the speed of the machine."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.cli.start import first_run
from retrain.cli.start.first_run import RUN_S, Sizes, Speed, fit
from retrain.kernel.errors import BackendError, Problem
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind
from tests.kit.problems import codes_in
from tests.kit.shared import first_or_long

TEMPLATES = [entry.spec.name for entry in load_plugins({}).registered(Kind.TEMPLATE)]


@pytest.mark.parametrize("name", first_or_long(TEMPLATES))
def test_every_template_explains_cleanly(name: str, command: Callable[..., Any], tmp_path: Path) -> None:
    if name == "campaign-tuned":
        pytest.importorskip("optuna")
    written = command("init", "--template", name)
    assert (written.code, written.err) == (0, "")
    is_campaign = name.startswith("campaign") or name in ("factorial", "sensitivity")
    file = "campaign.toml" if is_campaign else "retrain.toml"
    assert written.out.startswith(f"Wrote {file} ({name}). Next:\n  retrain explain")
    result = command("explain", file, "--json")
    assert result.code == 0, result.err
    content = json.loads(result.out)
    # three seeds give curves, and no verdict
    assert content["warnings"] == [] or name in ("quickstart", "sensitivity")
    assert all(f"{file}:" in row["origin"] for row in content["origins"].values())


def test_documented_templates_exist_with_their_documented_numbers(command: Callable[..., Any], tmp_path: Path) -> None:
    assert {"default", "quickstart", "experiment"} <= set(TEMPLATES)
    found = {}
    for name in ("default", "quickstart", "experiment"):
        command("init", *(["-t", name] if name != "default" else []))
        content = json.loads(command("explain", "--json").out)
        found[name] = [content[k] for k in ("max_steps", "batch_size", "group_size", "max_tokens", "condition", "seed")]
        (tmp_path / "retrain.toml").unlink()
    assert found == {
        "default": [100, 4, 16, 10240, "maxrl+gtpo_sepa", -1],
        "quickstart": [20, 2, 8, 1024, "grpo+none", -1],
        "experiment": [500, 8, 16, 10240, "maxrl+gtpo_sepa", 42],
    }


@pytest.mark.parametrize("obstacle", ["file", "folder", "dangling link"])
def test_nothing_is_overwritten(obstacle: str, command: Callable[..., Any], tmp_path: Path) -> None:
    target = tmp_path / "retrain.toml"
    if obstacle == "file":
        target.write_text("mine")
    elif obstacle == "folder":
        target.mkdir()
    else:
        target.symlink_to(tmp_path / "elsewhere")
    result = command("init")
    assert (result.code, result.out, codes_in(result.err)) == (2, "", ["init.file-exists"])
    assert not (tmp_path / "elsewhere").exists()
    if obstacle == "file":
        assert target.read_text() == "mine"


def test_the_list_as_text_and_as_json_and_the_nearest_name(command: Callable[..., Any], tmp_path: Path) -> None:
    unknown = command("init", "--template", "quikstart")
    assert (unknown.code, "'quickstart'" in unknown.err) == (2, True)
    text, data = command("init", "--list"), command("init", "--list", "--json")
    assert (text.code, data.code) == (0, 0)
    rows = json.loads(data.out)
    assert [row["name"] for row in rows] == TEMPLATES
    assert all(row["summary"] in text.out for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_a_plugins_template_is_written_under_its_own_file_name(
    distribution: Callable[..., Path], command: Callable[..., Any], tmp_path: Path
) -> None:
    source = (
        "from retrain.api import PluginSpec, hookimpl\n@hookimpl\ndef retrain_register_init_templates(register):\n"
        "    register(PluginSpec(name='mine', summary='s', factory=lambda: '[training]\\n', traits='mine.toml'))\n"
    )
    distribution("templater", {"templater": source})
    result = command("init", "-t", "mine")
    assert result.out == "Wrote mine.toml (mine). Next:\n  retrain explain mine.toml\n  retrain mine.toml\n"
    assert (tmp_path / "mine.toml").read_text() == "#:schema ./retrain.schema.json\n[training]\n"


WANTED = Sizes(
    batch_size=8, group_size=16, max_tokens=2048, max_steps=100, eval_examples=64, eval_samples=4, eval_every=20
)
SLOW = Speed(
    prefill_s=1e-3, decode_s=0.1, sample_s=1 / 120, train_s=1 / 100, start_s=20.0, prompt_tokens=40
)  # 135 M parameters


def test_a_fast_machine_keeps_every_size_and_two_cores_with_135_million_parameters_learn() -> None:
    assert fit(WANTED, replace(SLOW, prefill_s=1e-7, decode_s=1e-7, sample_s=1e-7, train_s=1e-7)) == WANTED
    sizes = fit(WANTED, SLOW)
    assert WANTED.evaluation_s(SLOW) > 3600  # as it was written before
    assert sizes.first_step_s(SLOW) <= 180
    assert sizes.run_s(SLOW) <= 1800
    assert sizes.evaluations_s(SLOW) <= sizes.training_s(SLOW) / 2
    assert sizes.max_steps >= 15
    assert sizes.group_size >= 4
    kept = fit(WANTED, SLOW, keep_steps=True)  # set by the user
    assert (kept.max_steps, kept.run_s(SLOW) <= 1800) == (WANTED.max_steps, True)


@settings(max_examples=40)
@given(
    sample=st.floats(1e-7, 0.1),
    train=st.floats(1e-7, 0.1),
    start=st.floats(0, 60),
    steps=st.integers(1, 500),
    examples=st.integers(0, 64),
)
def test_no_size_grows_and_both_targets_hold(
    sample: float, train: float, start: float, steps: int, examples: int
) -> None:
    wanted = replace(WANTED, max_steps=steps, eval_examples=examples)
    speed = replace(SLOW, decode_s=sample, sample_s=sample, train_s=train, start_s=start)
    sizes = fit(wanted, speed)
    for each in fields(Sizes):
        if each.name != "eval_every":  # 0 means never in between
            assert (getattr(sizes, each.name) >= 1) or not examples
            assert getattr(sizes, each.name) <= getattr(wanted, each.name)
    assert sizes.first_step_s(speed) <= 180
    assert sizes.run_s(speed) <= RUN_S


pytestmark = pytest.mark.usefixtures("offline")
TINY = ("init", "--model", "builtin:tiny", "--data", "tasks.jsonl", "--reward", "match")
MEASURED_SPEED = first_run.measured_speed  # before the fixture replaces it
SUMS = [{"prompt": f"What is {n} + 30?", "answer": str(n + 30)} for n in range(200)]
CRAWLING = Speed(prefill_s=1e-3, decode_s=0.2, sample_s=0.02, train_s=0.02, start_s=20.0, prompt_tokens=40)


def written(folder: Path) -> tuple[int, dict[str, Any]]:
    content = tomllib.loads((folder / "retrain.toml").read_text())
    return content["training"]["max_steps"], content["eval"]


def test_a_slow_machine_gets_a_run_of_half_an_hour(
    command: Callable[..., Any], put: Callable[..., Path], tmp_path: Path, machine: SimpleNamespace
) -> None:
    put("tasks.jsonl", SUMS)
    machine.speed = CRAWLING
    time = json.loads(command(*TINY, "--json").out)["time"]
    assert (time["is_measured"], time["first_step_s"] <= 180, time["run_s"] <= 1800) == (True, True, True)
    assert time["text"] in (tmp_path / "retrain.toml").read_text()
    steps, evaluation = written(tmp_path)
    assert (steps < 70, evaluation["examples"] < 40) == (True, True)


@pytest.mark.parametrize(
    ("speed", "options", "steps"),
    [
        (CRAWLING, ("--max-steps", "33"), 33),
        (BackendError(Problem(where="capacity --pilot", what="the pilot failed", fix="-")), (), 70),
    ],
    ids=["steps-of-the-user-stay", "a-pilot-that-fails"],
)
def test_sizes_that_are_not_fitted_are_the_usual_ones(
    speed: Any,
    options: tuple[str, ...],
    steps: int,
    command: Callable[..., Any],
    put: Callable[..., Path],
    tmp_path: Path,
    machine: SimpleNamespace,
) -> None:
    put("tasks.jsonl", SUMS)
    machine.speed = speed
    done = command(*TINY, *options)
    assert (done.code, "not measured, because the pilot failed" in done.out) == (0, not options)
    assert written(tmp_path)[0] == steps


@pytest.mark.slow
def test_a_model_that_is_here_is_measured(plugins: Plugins, tmp_path: Path) -> None:
    file = tmp_path / "retrain.toml"
    file.write_text('[model]\nmodel = "builtin:tiny"\n[training]\nmax_tokens = 8\n')
    prompts = [list(range(40, 60 + n)) for n in range(4)]
    found = first_run.measure(str(file), prompts, plugins)
    assert found.pop("probes_s") > 0.0
    measured = Speed(start_s=0.0, **found)
    assert measured.train_s > 0.0
    assert 0.0 < measured.sampling_s(4, 16, 8) < 60.0
    assert measured.longest_tokens <= 8


def test_a_model_that_cannot_be_loaded_is_a_reason_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "retrain.toml"
    file.write_text('[model]\nmodel = "/nowhere/at/all"\n[nonsense]\n')
    with pytest.raises(BackendError) as caught:
        MEASURED_SPEED(file, ())
    (problem,) = caught.value.problems
    assert (problem.code, problem.what.endswith(": unknown table")) == ("init.speed-unmeasured", True)
