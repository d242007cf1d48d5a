"""`retrain explain` and `retrain plugins`: what would run, where each value comes from, and what is installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

import retrain
from retrain.api import Capabilities
from retrain.cli.plugins import option_schema
from tests.kit.thinking_models import QWEN3, thinking_model

Command = Callable[..., Any]
DOCUMENTED_FIELDS = {
    *("mode", "config", "model", "backend", "backend_options", "backend_capabilities", "condition", "algorithm_mode"),
    *("advantage_mode", "transform_mode", "max_steps", "batch_size", "group_size", "datums_per_step", "total_datums"),
    *("max_tokens", "temperature", "lr", "seed", "lora_rank", "lora_alpha", "data", "reward_type", "log_dir"),
    *("adapter_path", "wandb_project", "warnings"),
}


def explained(command: Command, *arguments: str) -> dict[str, Any]:
    result = command("explain", *arguments, "--json")
    assert (result.code, result.err) == (0, "")
    content: dict[str, Any] = json.loads(result.out)
    return content


def test_the_documented_fields_and_their_arithmetic(command: Command, tmp_path: Path) -> None:
    content = explained(command, "--batch-size", "3", "--group-size", "5", "--max-steps", "7", "--lora-rank", "4")
    assert set(content) >= DOCUMENTED_FIELDS
    assert (content["datums_per_step"], content["total_datums"]) == (15, 105)
    assert (content["lora_alpha"], content["lora_scale"]) == (8, 2.0)
    assert (content["mode"], content["wandb_project"]) == ("single", "(disabled)")
    assert content["adapter_path"] == "logs/train/adapter"
    assert content["backend_capabilities"]["preserves_token_advantages"] is True
    assert list(tmp_path.iterdir()) == []


def test_origins_name_file_environment_and_flag(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my.toml").write_text("\n[lora]\nalpha = 5\n[resume]\nfrom = ''\n")
    monkeypatch.setenv("RETRAIN__TRAINING__SEED", "3")
    content = explained(command, "my.toml", "--lr", "1e-3")
    assert content["origins"] == {
        "lora.alpha": {"value": 5, "origin": "my.toml:3"},
        "resume.from": {"value": "", "origin": "my.toml:5"},
        "training.lr": {"value": 0.001, "origin": "--lr"},
        "training.seed": {"value": 3, "origin": "RETRAIN__TRAINING__SEED"},
    }
    text = command("explain", "my.toml", "--lr", "1e-3").out
    assert all(part in text for part in ("lora.alpha", "(my.toml:3)", "lora_alpha"))


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (("--group-size", "1"), "a group of one has no advantage"),
        (("--save-every", "0"), "only the last adapter is saved"),
        (("--temperature", "2.5"), "close to noise"),
        (("--lr", "1e-6"), "full fine-tuning"),
        (("--minibatches", "9"), "minibatches = 9, batch_size = 8: a step has 8 groups at most"),
    ],
)
def test_legal_but_odd_values_are_warned_of(arguments: tuple[str, ...], fragment: str, command: Command) -> None:
    assert any(fragment in warning for warning in explained(command, *arguments)["warnings"])
    assert fragment in command("explain", *arguments).out


def test_a_template_that_drops_the_thoughts_of_earlier_turns(command: Command, tmp_path: Path) -> None:
    plays = ("--environment-provider", "mcp", "--environment-args", '{"command": "x"}')
    model = ("--model", str(thinking_model(tmp_path / "model", QWEN3)))
    told = [
        [line for line in explained(command, *more)["warnings"] if "drops earlier thoughts" in line]
        for more in ((*model, *plays), (*model, *plays, "--environment-history", "rows"), model, plays)
    ]
    assert [len(lines) for lines in told] == [1, 0, 0, 0]


def test_truncated_completions_and_further_rounds(command: Command) -> None:
    plain = explained(command, "--max-tokens", "64", "--batch-size", "4", "--group-size", "8")
    assert not {"truncated", "soft_overlong", "refill"} & set(plain)
    chosen = ("--overlong", "mask", "--soft-overlong", "16", "--refill", "3")
    content = explained(command, "--max-tokens", "64", "--batch-size", "4", "--group-size", "8", *chosen)
    assert content["truncated"] == "left out of the loss"
    assert content["soft_overlong"] == "the reward falls by up to 1 over the last 16 of 64 tokens"
    assert content["refill"] == "up to 3 further rounds of 4 prompts until 4 groups can teach"
    assert content["max_tokens_per_step"] == 4 * plain["max_tokens_per_step"]
    assert content["datums_per_step"] == plain["datums_per_step"]  # what is trained stays


def test_the_loss_is_told_with_the_keys_about_it(command: Command) -> None:
    assert explained(command, "--seed", "1")["loss"] == "importance_sampling"
    content = explained(command, "--recipe", "dapo", "--clip-eps-high", "0.3")
    assert content["loss"] == "ppo, clip_eps = 0.2, clip_eps_high = 0.3, aggregation = token_mean"
    prime = ("--backend", "prime_rl", "--backend-opt", "output_dir=x", "--inference-engine", "vllm")
    assert "loss" not in explained(command, *prime, "--max-tokens", "512")


def test_updates_and_the_course_of_the_learning_rate(command: Command) -> None:
    plain = explained(command, "--seed", "1")
    assert (plain["updates_per_step"], plain["lr_schedule"], plain["warnings"]) == (1, "constant", [])
    course = ("--optim-schedule", "cosine", "--optim-warmup-steps", "5", "--optim-min-lr-ratio", "0.1")
    content = explained(command, "--lr", "1e-3", "--max-steps", "20", "--minibatches", "4", "--epochs", "2", *course)
    assert content["updates_per_step"] == 8
    assert content["lr_schedule"] == "cosine, from 0.001 down to 0.0001 within 20 steps, after 5 steps of warm-up"
    endless = explained(command, "--max-steps", "4", *course)["warnings"]
    assert endless == ["warmup_steps = 5, max_steps = 4: the learning rate never reaches lr"]
    cut = explained(command, "--minibatches", "50", "--epochs", "2", "--lora-rank", "0", "--lr", "1e-6")
    assert cut["updates_per_step"] == 16  # of 8 groups there are 8 minibatches at most
    assert not [warning for warning in cut["warnings"] if "LoRA" in warning]
    floor = command("explain", "--optim-min-lr-ratio", "0.1")
    assert (floor.code, "--optim-min-lr-ratio [optimizer]" in floor.err) == (2, True)
    prime = command("explain", "--backend", "prime_rl", "--backend-opt", "output_dir=x", *course)
    assert all(f"[optimizer] {key}" in prime.err for key in ("schedule", "warmup_steps", "min_lr_ratio"))


REGISTERS = "from retrain.api import PluginSpec, hookimpl\n@hookimpl\ndef retrain_register_"
TRANSFORM = """
from retrain.advantages import TransformSpec
print("a plugin that talks")
flat = TransformSpec(name="flat")
"""


@pytest.fixture
def searched(tmp_path: Path) -> Path:
    """A folder with two good modules, one that cannot be imported, one that calls sys.exit, and a private one."""
    folder = tmp_path / "plugins_of_this_test"
    folder.mkdir()
    (folder / "fine.py").write_text(TRANSFORM)
    (folder / "broken.py").write_text("import there_is_no_such_module\n")
    (folder / "leaves.py").write_text("raise SystemExit(3)\n")
    (folder / "_private.py").write_text("raise RuntimeError('nobody imports me')\n")
    (tmp_path / "run.toml").write_text(
        '[plugins]\nsearch_paths = ["plugins_of_this_test"]\n'
        '[algorithm]\ntransform_mode = "fine.flat"\nadvantage_mode = "grpp"\n'
    )
    return folder


def content_of(command: Command, *arguments: str) -> dict[str, Any]:
    result = command("plugins", *arguments, "--json")
    assert (result.code, result.err.replace("a plugin that talks\n", "")) == (0, "")
    content: dict[str, Any] = json.loads(result.out)
    return content


def test_every_row_names_distribution_version_and_file(command: Command) -> None:
    content = content_of(command)
    rows = {(kind, row["name"]): row for kind, rows in content["kinds"].items() for row in rows}
    row = rows["command", "plugins"]
    assert (row["distribution"], row["version"]) == ("retrain-core", retrain.__version__)
    assert Path(row["file"]) == Path(retrain.__file__).parent / "cli" / "plugins.py"
    for row in rows.values():
        assert Path(row["file"]).is_file(), row
    assert "config" not in content
    assert list(content_of(command, "--kind", "data-source")["kinds"]) == ["data source"]
    result = command("plugins", "--kind", "data-sauce")
    assert (result.code, "data-source" in result.err) == (2, True)


def test_nothing_is_imported_to_find_the_files(command: Command, distribution: Callable[..., Path]) -> None:
    plugin = (
        f"{REGISTERS}transforms(register):\n"
        '    register(PluginSpec(name="heavy", summary="s", factory="weighty.inner.part:make"))\n'
        '    register(PluginSpec(name="nowhere", summary="s", factory="there_is_none:make"))\n'
    )
    site = distribution("strangers", {"light_plugin": plugin})
    package = site / "weighty" / "inner"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "part.py").write_text("raise RuntimeError('imported')\n")
    rows = {row["name"]: row for row in content_of(command)["kinds"]["transform"]}
    assert rows["heavy"]["file"] == str(package / "part.py")
    assert rows["nowhere"]["file"] == ""


def test_with_a_configuration_its_modules_have_a_status_and_its_parts_are_traced(
    searched: Path, command: Command
) -> None:
    content = content_of(command, "run.toml")
    assert content["runtime"] == {"search_paths": ["plugins_of_this_test"], "strict": True}
    broken, fine, leaves = content["discovered"]
    assert fine == {"module": "plugins_of_this_test.fine", "file": str(searched / "fine.py"), "status": "ok"}
    assert broken["status"] == "error: ModuleNotFoundError: No module named 'there_is_no_such_module'"
    assert leaves["status"] == "error: SystemExit: 3"
    content = content_of(command, "run.toml", "--seed", "3")
    selected = {part["key"]: part for part in content["selected"]}
    dotted = selected["algorithm.transform_mode"]
    assert (dotted["name"], dotted["source"], dotted["file"]) == ("fine.flat", "dotted path", str(searched / "fine.py"))
    missing = selected["algorithm.advantage_mode"]
    assert (missing["source"], missing["file"], "grpp" in missing["problem"]) == ("", "", True)
    assert selected["backend.backend"]["distribution"] == "retrain-local"
    assert selected["data.source"]["name"] == "math"
    assert any("grpp" in problem for problem in content["problems"])
    shown = command("plugins", "run.toml").out
    assert "plugins_of_this_test.leaves  plugins_of_this_test/leaves.py  error: SystemExit: 3" in shown
    assert "not provided" in shown
    (searched.parent / "run.toml").rename(searched.parent / "retrain.toml")
    assert content_of(command)["config"] == "retrain.toml"


def test_a_clash_and_a_broken_plugin_are_shown(command: Command, distribution: Callable[..., Path]) -> None:
    second = '    register(PluginSpec(name="grpo", summary="Mine.", factory=len))\n'
    distribution("second-owner", {"second_owner": f"{REGISTERS}advantages(register):\n{second}"})
    distribution("broken-one", {"broken_one": "raise OSError('\\x1b[31mlibfoo.so')\n"})
    out = command("plugins").out
    assert out.count("CLASH: two owners") == 2
    (failure,) = (line for line in out.splitlines() if line.startswith("failed to load"))
    assert failure == "failed to load: broken-one 1.0 (broken_one): OSError: �[31mlibfoo.so"
    (failed,) = content_of(command)["failures"]
    assert (failed["distribution"], failed["source"]) == ("broken-one 1.0", "broken_one")


STRANGER = """
from retrain.api import PluginSpec, hookimpl

@hookimpl
def retrain_register_backends(register):
    register(PluginSpec(name="far", summary="Elsewhere.", factory="far_away:make", params="far_away:Options"))
"""


def test_the_local_backend_shows_all_that_it_promises_and_takes(command: Command) -> None:
    (local,) = (row for row in content_of(command, "--kind", "backend")["backends"] if row["name"] == "local")
    assert set(local["capabilities"]) == {field.name for field in fields(Capabilities)}
    assert local["capabilities"]["checkpoint_resume_mode"] == "exact"
    assert local["dependency"]["importable"] is True
    assert "torch" in {package["name"] for package in local["dependency"]["packages"]}
    option = local["option_schema"]["micro_batch_tokens"]
    assert option.pop("description")
    assert option == {"type": "integer", "default": 0, "choices": None, "range": {"minimum": 0}, "required": False}


def test_what_the_environment_leaves_out_is_said_with_what_to_do(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RETRAIN_BLOCK", "retrain-local")
    assert "left out by RETRAIN_PLUGINS or RETRAIN_BLOCK: retrain-local" in command("plugins").out
    assert content_of(command)["left_out"] == ["retrain-local"]
    content = content_of(command, "--kind", "backend")
    assert "local" not in {row["name"] for row in content["backends"]}
    hints = {row["name"]: row["hint"] for row in content["promised"]}
    assert hints["local"] == "RETRAIN_PLUGINS or RETRAIN_BLOCK leaves retrain-local out: change that"
    assert "local  not installed: RETRAIN_PLUGINS" in command("plugins", "--kind", "backend").out


def test_a_strangers_backend_that_lacks_a_package_says_so(command: Command, distribution: Callable[..., Path]) -> None:
    site = distribution("far-backend", {"far_plugin": STRANGER})
    with (site / "far_backend-1.0.dist-info" / "METADATA").open("a") as metadata:
        metadata.write("Requires-Dist: numpy>=1\nRequires-Dist: no-such-package>=2\n")
    (row,) = (row for row in content_of(command, "--kind", "backend")["backends"] if row["name"] == "far")
    assert row["dependency"]["importable"] is False
    assert row["dependency"]["hint"] == "pip install far-backend"
    packages = {package["name"]: package["is_met"] for package in row["dependency"]["packages"]}
    assert packages == {"numpy": True, "no-such-package": False}
    assert row["option_error"].startswith("ModuleNotFoundError")
    assert row["capabilities"] == {}
    shown = command("plugins", "--kind", "backend").out
    assert "not usable    lacks no-such-package: pip install far-backend" in shown
    assert "[backend.options] cannot be read: ModuleNotFoundError" in shown


def test_options_of_every_form_are_described() -> None:
    class Options(BaseModel):
        transport: Literal["filesystem", "zmq"] = Field("filesystem", description="How batches travel.")
        port: int = Field(gt=0, le=65535)
        wait_s: float | None = Field(None, ge=0.0)

    schema = option_schema(Options)
    named = {"choices": ["filesystem", "zmq"], "range": {}, "required": False, "description": "How batches travel."}
    assert schema["transport"] == {"type": "string", "default": "filesystem", **named}
    assert (schema["port"]["required"], schema["port"]["range"]) == (True, {"exclusiveMinimum": 0, "maximum": 65535})
    assert (schema["wait_s"]["type"], schema["wait_s"]["range"]) == ("number or null", {"minimum": 0.0})
