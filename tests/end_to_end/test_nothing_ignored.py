"""Every key and option is read, refused, or said to have no effect; every field of a run is described and exists."""

from __future__ import annotations

import dis
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
import pytest

from retrain.cli.manual.sections import described
from retrain.kernel.config.keys import Key, Table, keys_of
from retrain.kernel.config.load import TableEntry
from retrain.kernel.declared import Kind, MetricSpec
from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.discover import load_plugins
from retrain.run.configure import load_file
from retrain.run.notices import without_effect
from retrain.run.tables import registered_tables
from tests.end_to_end.running import records, tiny
from tests.kit.shared import made_once

PLUGINS = load_plugins({})
TABLES: Mapping[str, TableEntry] = registered_tables(PLUGINS)
KEYS = [key for name, entry in TABLES.items() for key in keys_of(name, entry.model, entry.traits.flag_prefix)]
# Modules that look at every key, whatever it means.
OF_ALL_KEYS = {
    *("config/keys.py", "config/load.py", "config/resolved.py", "session/check.py", "session/notices.py"),
    *("identity/collect.py", "identity/changes.py", "records/manifest.py", "text/secrets.py"),
    "end_to_end/test_nothing_ignored.py",
}
PLAIN = {
    "model": {"model": "builtin:tiny", "lora_rank": 2},
    "backend": {"backend": "local", "devices": "cpu"},
    "training": {"seed": 1, "max_steps": 3, "batch_size": 2, "group_size": 6, "max_tokens": 24, "lr": 1e-3},
    "data": {"source": "arithmetic", "options": {"size": 8}},
    "eval": {"examples": 1, "samples": 1},
    "health": {"steps": 1},
}
# What has to be on for further keys to be read.
CONTEXTS: tuple[dict[str, dict[str, Any]], ...] = (
    {
        "kl": {"coef": 0.1, "target": 0.1, "horizon": 10},
        "entropy": {"clip_cov": 0.1},
        "backpressure": {"enabled": True, "warmup_steps": 1},
        "sft": {"steps": 1, "source": "arithmetic"},
        "algorithm": {
            "advantage_mode": "maxrl",
            "transform_mode": "gtpo_hicra",
            "loss": "ppo",
            "is_bounds": [0.5, 2.0],
        },
        "reward": {"weights": {"math": 1.0, "match": 1.0}, "shadow": "match"},
        "training": {"keep_best": 1, "refill": 1},
    },
    {
        "kl": {"coef": 0.1, "where": "reward"},
        "entropy": {"kl_cov": 0.5},
        "training": {"minibatches": 2, "batch_size": 2, "max_staleness": 0},
        "algorithm": {"algorithm_mode": "grpo_none", "surprisal_mask_rho": 0.5},
        "optimizer": {"schedule": "linear", "warmup_steps": 1},
    },
)
# Keys that none of these runs can read, by prefix, and where they are tried.
ELSEWHERE = {
    "deadlines.": "each is read while its phase lasts: tests/retrain-core/observe/watchdog",
    **dict.fromkeys(("campaign.", "squeeze."), "other commands: tests/retrain-core/campaign and tools/squeeze"),
    **dict.fromkeys(("reward.", "environment."), "servers, files and programs: tests/retrain-rewards"),
    **dict.fromkeys(("backend.throttle_dir", "backend.max_concurrent", "inference."), "servers: retrain-core/engines"),
    "model.base_url": "services: tests/retrain-tinker",
    **dict.fromkeys(("planning.model", "planning.threshold"), "an embedding model: tests/retrain-sepa/planning"),
    **dict.fromkeys(("backpressure.throttle_margin", "backpressure.increase_margin"), "a fit takes many steps"),
    "teacher.": "tests/retrain-core/credit/teacher and end_to_end/test_killed.py",
    "logging.": "trackers: tests/retrain-core/observe/trackers",
}


class Reads:
    """Collects `table.key` of every value that a part looks at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: set[str] = set()
        paths = {
            (entry.model.__name__, field): f"{table}.{info.alias or field}"
            for table, entry in TABLES.items()
            for field, info in entry.model.model_fields.items()
        }
        plain = Table.__getattribute__

        def tracked(this: Any, name: str) -> Any:
            if path := paths.get((type(this).__name__, name)):
                frame = sys._getframe(1)
                while frame.f_back and frame.f_code.co_filename.endswith("config/resolved.py"):
                    frame = frame.f_back  # `config.value` reads for its caller
                if not frame.f_code.co_filename.endswith(tuple(OF_ALL_KEYS)):
                    self.found.add(path)
            return plain(this, name)

        monkeypatch.setattr(Table, "__getattribute__", tracked)


def other_value(key: Key) -> Any:
    info = next(i for n, i in TABLES[key.table].model.model_fields.items() if (i.alias or n) == key.name)
    options = [arg for arg in get_args(key.annotation) if get_origin(key.annotation) is Literal and arg != key.default]
    if options:
        return options[-1]
    bounds = {type(each).__name__.lower(): each for each in info.metadata}
    low = float(getattr(bounds.get("ge"), "ge", getattr(bounds.get("gt"), "gt", -1e9)))
    high = float(getattr(bounds.get("le"), "le", getattr(bounds.get("lt"), "lt", 1e9)))
    if isinstance(key.default, bool):
        return not key.default
    if isinstance(key.default, int):
        return key.default + 1 if key.default + 1 <= high else key.default - 1
    if isinstance(key.default, float):
        middle = (max(low, 0.0) + min(high, 2 * key.default + 1.0)) / 2
        return middle if middle != key.default else (middle + min(high, 2 * key.default + 1.0)) / 2
    return {str: "other", list: ["other"], dict: {"other": 1}}.get(type(key.default), "other")


def merged(*documents: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for document in documents:
        for table, values in document.items():
            found[table] = {**found.get(table, {}), **values}
    return found


def is_answered(key: Key) -> bool:
    """Whether a plain run with another value of the key is refused, or is told that it has no effect."""
    try:
        checked = load_file(merged(PLAIN, {key.table: {key.name: other_value(key)}}), [], PLUGINS)
    except ConfigError as error:
        return any(f"[{key.table}] {key.name}" in problem.where for problem in error.problems)
    lines = without_effect(checked.config, PLUGINS, checked.flow, checked.tables)
    return any(line.startswith(f"[{key.table}] ") and key.name in line.partition(":")[0] for line in lines)


@pytest.mark.slow
def test_every_key_is_read_refused_or_said_to_have_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from retrain.run.session import train

    monkeypatch.chdir(tmp_path)
    reads = Reads(monkeypatch)
    by_run: list[set[str]] = []
    for number, context in enumerate(({}, *CONTEXTS)):
        reads.found.clear()
        where = {"logging": {"log_dir": f"run{number}"}}
        train(load_file(merged(PLAIN, context, where), [], PLUGINS, starts_run=True), PLUGINS)
        by_run.append(set(reads.found))
    plain, anywhere = by_run[0], set[str]().union(*by_run)
    keys = [key for key in KEYS if not key.pending]
    of_others = ("campaign.", "squeeze.", "deadlines.")  # other commands, and time
    ignored = [k.path for k in keys if k.path not in plain and not is_answered(k) and not k.path.startswith(of_others)]
    unread = [k.path for k in keys if k.path not in anywhere and not k.path.startswith(tuple(ELSEWHERE))]
    assert not ignored, "another value changes nothing in a plain run, and nobody says so"
    assert not unread, "no run reads it"


def commands() -> Iterator[tuple[str, click.Command]]:
    waiting = [(f"retrain {each.spec.name}", each.spec.load()) for each in PLUGINS.registered(Kind.COMMAND)]
    while waiting:
        path, command = waiting.pop()
        yield path, command
        if isinstance(command, click.Group):
            waiting += [(f"{path} {name}", inner) for name, inner in command.commands.items()]


def names_read(function: Callable[..., Any]) -> set[str]:
    """The arguments that a function's code looks at; those of `**options` count together."""
    code = function.__code__
    loads = {"LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_FAST_CHECK"}
    read = {each.argval for each in dis.get_instructions(code) if each.opname in loads}
    inner = (each for each in code.co_consts if hasattr(each, "co_code"))
    for each in inner:
        read |= {i.argval for i in dis.get_instructions(each) if i.opname in loads}
    return read


def test_every_option_is_read_by_its_command() -> None:
    unread, counted = [], 0
    for path, command in commands():
        if command.callback is None:
            continue
        function: Any = command.callback
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        code = function.__code__
        own = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        read = names_read(function)
        rest = code.co_varnames[len(own)] if code.co_flags & 0x08 else ""
        for option in command.params:
            counted += 1
            is_read = option.name in read if option.name in own else rest in read
            if option.expose_value and not is_read:
                unread.append(f"{path} {option.opts[0]}")
    assert counted > 200
    assert not unread


SIZE = ("--max-steps", "3", "--batch-size", "4", "--group-size", "4", "--save-every", "0")
EVERYTHING = (
    *("--eval-examples", "4", "--eval-samples", "2", "--eval-every", "2", "--bp-enabled", "true"),
    *("--bp-warmup-steps", "2", "--bp-max-batch-size", "4", "--sepa-correct-rate-gate", "0"),
    *("--reward-weights", '{"match": 1.0, "math": 0.5}', "--reward-shadow", "math"),
    *("--refill", "1", "--overlong", "drop", "--soft-overlong", "8"),
)
CUT_OFF = (
    *("--uncertainty-kind", "shannon_entropy", "--eval-examples", "0", "--max-tokens", "24"),
    *("--health-steps", "1", "--health-truncation", "0", "--minibatches", "2"),
    *("--overlong", "mask", "--kl-coef", "0.01", "--kl-where", "reward", "--sft-steps", "1", "--sft-lr", "1e-3"),
)
# Described, and not to be seen in these runs; each has a test where it comes about.
SEEN_ELSEWHERE = {
    "end_to_end/test_greedy_baseline.py": "greedy_tokens greedy_reward_mean greedy_no_verdict_count",
    "end_to_end/test_killed.py": "sampler sampler_chance_mean sampler_uniform_share sampler_uniform_correct_rate",
    "retrain-core/observe/gaming/test_alarm_watch.py": "gaming_since gaming_example gaming_tokens",
    "retrain-core/observe/gaming/test_suspicion.py": "gaming_length_shift gaming_entropy_shift gaming_ngram_share "
    "gaming_answer_shift gaming_prompt_answers gaming_format_credit gaming_suspected gaming_ngram",
    "retrain-core/kernel/test_train.py, a step whose numbers are not finite": "rejected",
    "retrain-core/run/backpressure, a fit": "bp_sigma bp_kappa bp_p_star bp_utilization bp_ceiling",
    "retrain-rewards/judge": "judge_calls judge_tokens_in judge_tokens_out judge_cost_usd",
    "retrain-core/engines, servers that fail": "inference_retries inference_moved inference_servers inference_reloads",
    "end_to_end/test_inference_servers.py": "probe_gap_mean probe_gap_max engine_gap_mean engine_gap_p99 "
    "engine_gap_max",
    "retrain-core/credit/teacher": "teacher_kl_mean teacher_kl_k1_mean teacher_time_s",
    "retrain-core/run/steps/test_controls.py": "verifier_correct_rate",
    "retrain-local/model/test_experts.py": "expert_load_entropy expert_load_max expert_unused_frac "
    "expert_mismatch_rate",
    "retrain-prime-rl/test_prime_rl_backend.py": "prime_rl_enqueue_time_s prime_rl_sync_time_s prime_rl_step "
    "prime_rl_policy_lag prime_rl_stale_steps",
    "end_to_end/test_agents.py": "turns_mean turn_limit_rate rewritten_history_count dropped_call_count",
    "end_to_end/test_thinking.py": "cut_thought_rate",
    "end_to_end/test_several_tasks.py": "task_{task}_{field} task_{task}_share tasks_out macro_correct_rate "
    "eval_weighted_{field}",
    "end_to_end/test_self_distillation.py": "teacher_rate",
    "retrain-core/kernel/test_overlap.py": "staleness_mean staleness_max overlap_time_s sampler_idle_time_s "
    "trainer_idle_time_s",
}
UNITS = {"", "text", "flag", "list", "nats", "nats²", "tokens", "tokens/s", "s", "rows", "groups", "prompts"}
UNITS |= {"completions", "examples", "scores", "requests", "turns", "times", "steps", "USD"}


def _pattern(spec: MetricSpec) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{\w+\\\}", r"\\w+", re.escape(spec.name)))


def _fits(value: Any, unit: str) -> bool:
    if unit in ("text", "flag", "list"):
        return isinstance(value, {"text": str, "flag": bool, "list": list}[unit])
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    def make(folder: Path) -> None:
        for name, flags in (("everything", EVERYTHING), ("cut_off", CUT_OFF)):
            tiny(*SIZE, *flags, "--log-dir", name, cwd=folder)

    folder = made_once(tmp_path_factory, "metrics", make)
    return [folder / "everything", folder / "cut_off"]


@pytest.fixture(scope="session")
def lines(runs: list[Path]) -> list[dict[str, Any]]:
    return [line for run in runs for line in records(run / "metrics.jsonl")]


def test_fields_and_descriptions_match_and_values_are_of_their_unit(lines: list[dict[str, Any]]) -> None:
    specs = [spec for specs in described(load_plugins({})).values() for spec in specs]
    exact = {spec.name: spec for spec in specs}
    assert len(exact) == len(specs)
    for spec in specs:
        assert spec.meaning.endswith("."), spec.name
        assert spec.unit in UNITS, spec.name
    seen = set()
    for line in lines:
        for name, value in line.items():
            fitting = [each for each in specs if _pattern(each).fullmatch(name)]
            assert fitting, f"{name} is not described"
            unit = exact.get(name, fitting[0]).unit
            assert _fits(value, unit), (name, value, unit)
            seen |= {each.name for each in fitting}
        if line["step"] >= 0:
            assert not [spec.name for spec in specs if not spec.absent and spec.name not in line]
        elif "eval_examples" in line:  # before training
            assert all(name.startswith("eval_") for name in line.keys() - {"step"})
    assert exact.keys() - seen == set(" ".join(SEEN_ELSEWHERE.values()).split())


def test_the_page_of_files_names_every_file_and_field(runs: list[Path]) -> None:
    page = (Path(__file__).parents[2] / "docs/pages/read-a-run.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`([\w./]+)`", page))
    for run in runs:
        for file in run.iterdir():
            assert {file.name, f"{file.name}/"} & documented or f"`{file.name}/" in page, file.name
        for line in records(run / "emergence" / "generations.jsonl"):
            assert set(line) <= documented
        assert set(json.loads((run / "run.json").read_text(encoding="utf-8"))) <= documented
        assert {file.name for file in (run / "emergence").iterdir()} <= {Path(name).name for name in documented} | {
            "tokens"
        }
