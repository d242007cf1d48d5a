"""Every documented key exists in its table with its documented default and type; the documented file is accepted."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from retrain.kernel.config.load import TableEntry, all_keys, load_config
from retrain.kernel.registry import Plugins
from retrain.run.check import check_names, check_options

FULL = Path(__file__).with_name("full_annotated.toml")

# The field reference of the documentation. `adapter_path` differs on purpose: empty = inside the run folder.
DOCUMENTED: dict[str, dict[str, Any]] = {
    "backend": {"backend": "local", "devices": "gpu:0", "adapter_path": "", "options": {}}
    | {"throttle_dir": "", "max_concurrent": 4},
    "model": {"model": "Qwen/Qwen3-4B-Instruct-2507", "base_url": "", "lora_rank": 32},
    "algorithm": {
        "algorithm_mode": "",
        "advantage_mode": "maxrl",
        "transform_mode": "gtpo_sepa",
        "uncertainty_kind": "surprisal",
        "surprisal_mask_rho": 0.0,
        "params": {},
        "advantage_params": {},
        "transform_params": {},
    },
    "plugins": {"search_paths": ["plugins"], "strict": True},
    "training": {
        "seed": -1,
        "max_steps": 500,
        "batch_size": 8,
        "group_size": 16,
        "max_tokens": 10240,
        "temperature": 0.7,
        "lr": 4e-5,
        "weight_decay": 0.0,
        "max_examples": 0,
        "save_every": 20,
        "top_p": 1.0,
    },
    "optimizer": {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "grad_clip_norm": 0.0},
    "lora": {"alpha": 0, "dropout": 0.0},
    "data": {"source": "math"},
    "environment": {"provider": "", "id": "", "args": {}, "max_turns": -1, "auto_install": False},
    "planning": {"detector": "regex", "model": "all-MiniLM-L6-v2", "threshold": 0.02},
    "gtpo": {"beta": 0.1},
    "hicra": {"alpha": 0.2},
    "sepa": {"steps": 500, "schedule": "linear", "delay_steps": 50, "correct_rate_gate": 0.1},
    "inference": {
        "engine": "pytorch",
        "url": "",
        "attention_kernel": "default",
        "dtype": "auto",
        "kv_cache_dtype": "auto",
        "prefix_caching": True,
    },
    "reward": {"type": "match", "judge_model": "", "custom_module": "", "custom_function": "score"},
    "backpressure": {
        "enabled": False,
        "warmup_steps": 10,
        "ema_decay": 0.9,
        "throttle_margin": 0.85,
        "increase_margin": 0.5,
        "min_batch_size": 1,
        "max_batch_size": 64,
        "peak_gflops": 0.0,
        "peak_bw_gb_s": 0.0,
    },
    "squeeze": {
        "min_variance_retention": 0.95,
        "adapter_path": "",
        "source_rank": 0,
        "target_ranks": [],
        "output_path": "",
        "compress_to": 0,
        "device": "cpu",
    },
    "resume": {"from": ""},
    "logging": {
        "log_dir": "logs/train",
        "wandb_project": "",
        "wandb_run_name": "",
        "wandb_entity": "",
        "wandb_group": "",
        "wandb_tags": "",
        "checkpoint_artifacts": False,
        "strategic_grams": "",
    },
    "campaign": {
        "seeds": [42, 101, 202, 303, 404, 505, 606, 707],
        "max_steps": 500,
        "parallel": False,
        "max_workers": 0,
        "stagger_seconds": 0.0,
        "conditions": [
            {"advantage_mode": "grpo", "transform_mode": "none"},
            {"advantage_mode": "maxrl", "transform_mode": "none"},
            {"advantage_mode": "maxrl", "transform_mode": "gtpo"},
            {"advantage_mode": "maxrl", "transform_mode": "gtpo_hicra"},
            {"advantage_mode": "maxrl", "transform_mode": "gtpo_sepa"},
        ],
    },
    "eval": {"every": 0, "examples": 0, "samples": 4, "seed": 0},
}
ROWS = [(f"{table}.{name}", default) for table, keys in DOCUMENTED.items() for name, default in keys.items()]


@pytest.mark.parametrize(("path", "default"), ROWS, ids=[path for path, _ in ROWS])
def test_a_documented_key_has_its_documented_default(
    path: str, default: object, tables: Mapping[str, TableEntry]
) -> None:
    config, problems = load_config(None, tables=tables)
    table, _, name = path.partition(".")
    value = config.as_dict()[table][name]
    assert problems == []
    assert value == default
    assert type(value) is type(default)


def test_defaults_of_every_key_are_valid_when_written_out(tables: Mapping[str, TableEntry]) -> None:
    for name, entry in tables.items():
        defaults = entry.model().model_dump(by_alias=True)
        assert entry.model.model_validate(defaults).model_dump(by_alias=True) == defaults, name


def test_every_key_explains_itself(tables: Mapping[str, TableEntry]) -> None:
    for key in all_keys(tables):
        assert len(key.description) > 4, key.path
        assert key.description.endswith("."), key.path


def test_containers_are_not_shared_between_configurations(tables: Mapping[str, TableEntry]) -> None:
    first, _ = load_config(None, tables=tables)
    first.backend.options["x"] = 1
    second, _ = load_config(None, tables=tables)
    assert second.backend.options == {}


def test_the_documented_full_file_contains_every_documented_table() -> None:
    written = tomllib.loads(FULL.read_text(encoding="utf-8"))
    assert set(DOCUMENTED) - set(written) == {"campaign", "eval", "lora", "optimizer", "planning"}


def test_the_documented_full_file_is_accepted(tables: Mapping[str, TableEntry], plugins: Plugins) -> None:
    config, problems = load_config(FULL, tables=tables)
    assert problems == []
    assert check_names(config, plugins, tables) + check_options(config, plugins) == []
    assert config.backend.adapter_path == "/tmp/retrain_adapter"
    assert config.origin("training.lr").place == f"{FULL}:42"


def test_the_documented_full_file_explains_as_a_training_run(command: Callable[..., Any]) -> None:
    result = command("explain", str(FULL), "--json")
    assert result.code == 0, result.err
    assert '"mode": "single"' in result.out
    assert '"condition": "maxrl+gtpo_sepa"' in result.out
