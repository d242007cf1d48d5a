"""Which documented command lines are not run by the tests, and why; what the others find in their folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from retrain_rewards.sandbox.sandbox import find_sandbox
from tests.docs.reading import PAGES, name_of, typed_lines

SERVES = "serves until it is stopped; tests/retrain-core/use/test_server.py, and tests/end_to_end/test_clients.py"
HUB = "trains a model of the hub on a GPU"
DATA = "needs a data set of the hub; tests/retrain-rewards/sources/test_hub_source.py reads local copies of its layout"
SERVER = "needs an inference server; `nox -s server-vllm`, `nox -s server-max` and tests/end_to_end start theirs"
SERVICE = "needs a service and its key"
HOURS = "measures for minutes and rewrites the page; tests/end_to_end/test_benchmarks.py runs each benchmark, shortened"
MATRIX = "makes an environment of its own; .ci/run types it as it stands"
TOOL = "jq and less are not ours, and `tail -f` never ends"
REAL = "needs a model of 93 MB; `nox -s real` makes and trains it"
REFEREE = "makes an environment with TRL; tests/servers/test_trl.py and test_verl.py are what it runs"
NO_SANDBOX = "no sandbox works on this machine"
MERGED = "loads transformers and PEFT for seconds; tests/retrain-local/export merges and exports"
FAILED = "needs a run whose reward failed; tests/retrain-core/cli/test_replay_failures.py replays one"
UNFINISHED = "needs a run that goes on; tests/retrain-core/verdicts/test_forecast.py"
# By page: a line, or its beginning followed by ` ...`, and the reason.
NOT_RUN: dict[str, dict[str, str]] = {
    "docs/pages/after-training.md": {
        "retrain chat logs/train --compare base": "waits for questions; tests/retrain-core/use/test_chat.py",
        "retrain serve logs/train": SERVES,
        "retrain serve logs/train --adapter ...": SERVES,
        "retrain export logs/train --format transformers --out merged": MERGED,
        "retrain export logs/train --format transformers --checkpoint ...": MERGED,
        "retrain export logs/train --format gguf ...": MERGED,
        "retrain export logs/train --format mlx ...": "needs mlx-lm; tests/end_to_end/test_trained.py",
        "retrain export logs/train --push me/sums --private": "needs the hub; tests/kit/hub_server.py stands in for it",
    },
    "README.md": {
        "python -m pip install nox && python -m nox -s quickstart": MATRIX,
        "python -m pip install nox && python -m nox -s tests": MATRIX,
    },
    "CONTRIBUTING.md": {
        "pip install -c constraints.txt nox ...": "installs the tools that already run this test",
        "pip install -c constraints.txt -e ...": "`nox -s tests` installs the same extras under the same constraints",
    },
    "docs/pages/algorithms/recipes.md": {
        "python benchmarks/recipes.py build/recipes": HOURS,
        "python benchmarks/recipes.py build/recipes --task rewards": HOURS,
    },
    "docs/pages/backends.md": {
        "retrain doctor prime_rl.toml": "needs PRIME-RL's inference server",
        "retrain prime_rl.toml": "needs PRIME-RL's trainer and inference server",
        "retrain doctor tinker.toml": SERVICE,
        "retrain tinker.toml": SERVICE,
        'pip install "skyrl-tx[tinker]==0.3.0" ...': "`nox -s server-tinker` installs and starts SkyRL-tx",
        "python -m tx.tinker.api ...": "`nox -s server-tinker` installs and starts SkyRL-tx",
    },
    "docs/pages/campaigns.md": {
        "retrain status logs/campaign_20260301_120000/runs/maxrl+none_s7 --forecast --among logs": UNFINISHED,
        "python benchmarks/records_scale.py": HOURS,
        "python benchmarks/report_scale.py": HOURS,
        "python benchmarks/campaign_scale.py": HOURS,
    },
    "docs/pages/coming-from.md": {
        "nox -s referee": REFEREE,
        "git clone ...": "needs the network",
        "RETRAIN_VERL=/tmp/verl nox -s referee": REFEREE,
    },
    "docs/pages/your-model.md": {
        "retrain capacity real.toml --pilot 3": HUB,
        "retrain doctor real.toml": HUB,
        "retrain real.toml": HUB,
        "retrain init --model Qwen/Qwen3-0.6B ...": HUB,
        'pip install -c constraints.txt "./retrain-local[smollm2]"': REAL,
        "python -m retrain_local.smollm2 smollm2": REAL,
        "retrain": REAL,
        "retrain --max-steps 20 --eval-every 20 --save-every 0 --lora-rank 0 --lr 1e-5": REAL,
        "retrain --max-steps 20 --eval-every 20 --save-every 0 --lora-rank 0 --lr 3e-5 ...": REAL,
        "retrain --max-steps 20 --eval-every 20 --save-every 0 --set model.quantize=nf4": REAL,
        "nox -s real": "makes the model and an environment of its own",
    },
    "docs/pages/try-it.md": {"retrain capacity real.toml --pilot 3": HUB, "retrain real.toml": HUB},
    "docs/pages/engines.md": {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve ...": SERVER,
        "retrain --inference-engine vllm ...": SERVER,
        'pip install "mlx[cpu]" mlx-lm': SERVER,
        "mlx_lm.server ...": SERVER,
        "retrain --inference-engine mlx ...": SERVER,
        "python -m sglang.launch_server ...": "needs SGLang and a GPU",
        "retrain --inference-engine sglang ...": "needs SGLang and a GPU",
        "max serve ...": SERVER,
        "retrain --inference-engine max ...": SERVER,
    },
    "docs/pages/read-a-run.md": {
        "tail -f logs/train/metrics.jsonl ...": TOOL,
        "jq -r ...": TOOL,
        "retrain status --follow --active": "never ends; tests/retrain-core/inspect/test_status.py",
        "retrain watch logs/train": "never ends; tests/retrain-core/report/watch serves pages",
    },
    "docs/pages/performance.md": {
        "python benchmarks/step.py --json ...": HOURS,
        "python benchmarks/step.py --model ...": HOURS,
        "python benchmarks/startup.py ...": HOURS,
        "python benchmarks/sample.py --json ...": HOURS,
        "python benchmarks/sample.py --model ...": HOURS,
        "python benchmarks/train.py --json ...": HOURS,
        "python benchmarks/train.py --vocabulary ...": HOURS,
        "python benchmarks/scale.py ...": HOURS,
        "python benchmarks/tiers.py ...": HOURS,
        "python benchmarks/gpu.py ...": "needs a GPU; tests/end_to_end/test_gpu_proof.py and test_benchmarks.py",
    },
    "docs/pages/reliability.md": {"nox -s soak -- --hours 1 --seed 22": "takes an hour; tests/soak/test_soak.py"},
    "docs/pages/share.md": {
        "retrain rerun train.rtpack": "asks; tests/retrain-core/tools/pack/test_contents.py makes its environment",
    },
    "docs/pages/agents.md": {"retrain --environment-provider verifiers ...": "fetches an environment of a hub"},
    "docs/pages/rewards.md": {
        "retrain audit --replay logs/train/failures": FAILED,
        "retrain audit --replay logs/train/failures/step_000012_0.json": FAILED,
        **({} if find_sandbox()[0] else {"retrain audit --model builtin:tiny --reward-type code ...": NO_SANDBOX}),
    },
    "docs/pages/algorithms/sampling.md": {"python benchmarks/samplers.py build/samplers": HOURS},
    "retrain-core/src/retrain/cli/manual/manual.md": {"retrain audit --replay logs/train": FAILED},
    "docs/pages/your-data.md": {
        "retrain init --data openai/gsm8k ...": DATA,
        "retrain init --data gsm8k ...": DATA,
        "retrain init --model builtin:tiny --data reasoning_gym:chain_sum ...": "needs the extra reasoning-gym",
    },
}
# What a page shows to fail.
EXIT_CODES = {"docs/pages/share.md": {"retrain rerun train.rtpack --yes --here --set training.seed=7": 1}}
# Files that a line names and its page shows: the language of the block, and how it begins.
SHOWN = {
    "docs/pages/algorithms/recipes.md": {
        "recipes.toml": ("toml", "[campaign]\nseeds = [42, 101, 202]"),
        "two.toml": ("toml", "[campaign]\nseeds = [42, 101, 202, 303"),
    },
    "docs/pages/rewards.md": {
        "my_reward.py": ("python", "# my_reward.py"),
        "programs.jsonl": ("json", '{"prompt": "Read two'),
    },
    "docs/pages/after-training.md": {"sets.toml": ("toml", "[eval]\nexamples = 64")},
    "docs/pages/write-a-plugin.md": {"my_module.py": ("python", "def centred(")},
    "docs/pages/backends.md": {"prime_rl.toml": ("toml", '[backend]\nbackend = "prime_rl"')},
}
# Files that a line names and its page only speaks of.
PUBLIC = '[model]\nmodel = "builtin:tiny"\n\n[training]\nmax_steps = 10\nclip_ratio_c = 3.0\ntl_grpo = true\n'
REAL_RUN = '[model]\nmodel = "Qwen/Qwen3-0.6B"\n'  # `init`, which writes it, reads the model from the hub
TASKS = "".join(f'{{"prompt": "What is {n} + {n}?", "answer": "{2 * n}"}}\n' for n in range(1, 33))
GIVEN = {
    "README.md": {"tasks.jsonl": TASKS},
    "docs/pages/your-data.md": {"tasks.jsonl": TASKS},
    "docs/pages/coming-from.md": {"public.toml": PUBLIC},
    "docs/pages/your-model.md": {"real.toml": REAL_RUN},
    "retrain-core/src/retrain/cli/manual/manual.md": {
        "tasks.jsonl": TASKS,
        "other.jsonl": TASKS,
        "tasks.csv": "question,solution\n" + "".join(f"What is {n} + 1?,{n + 1}\n" for n in range(1, 33)),
    },
    "docs/pages/after-training.md": {
        "questions.txt": "What is 2 + 2?\nWhat is 9 * 8?\n",
        "tasks.jsonl": TASKS,
        "hard.jsonl": TASKS,
    },
}
# Typed by tests/docs/test_newcomer.py.
NEWCOMER = ("README.md", "docs/pages/try-it.md")
# Pages that change the environment, or need all six distributions: one after another, in this order, after the others.
IN_ORDER = (
    "CONTRIBUTING.md",
    "docs/pages/configuration.md",
    "docs/pages/coming-from.md",
    "docs/pages/backends.md",
    "docs/pages/write-a-plugin.md",
    "retrain-tinker/README.md",
    "retrain-prime-rl/README.md",
)
# The one page that trains at full length; elsewhere the environment shortens what a line does not fix itself.
FULL_LENGTH = "docs/pages/index.md"
SHORT = {
    "RETRAIN__TRAINING__MAX_STEPS": "3",
    "RETRAIN__TRAINING__BATCH_SIZE": "2",
    "RETRAIN__TRAINING__GROUP_SIZE": "4",
    "RETRAIN__TRAINING__MAX_TOKENS": "40",
    "RETRAIN__EVAL__EXAMPLES": "2",
    "RETRAIN__CAMPAIGN__SEEDS": "[42, 101]",
    "RETRAIN__CAMPAIGN__CONDITIONS": (
        '[{"advantage_mode": "grpo", "transform_mode": "none"}, {"advantage_mode": "maxrl", "transform_mode": "gtpo"}]'
    ),
}


def reason_not_run(page: Path, line: str) -> str:
    """Why a line is not run; empty when it is."""
    entries = NOT_RUN.get(name_of(page), {})
    return next((why for entry, why in entries.items() if stands_for(entry, line)), "")


def stands_for(entry: str, line: str) -> bool:
    """Whether an entry of the list is this line, or its beginning."""
    return line.startswith(entry.removesuffix("...")) if entry.endswith(" ...") else line == entry


def lines_to_run(page: Path) -> list[str]:
    return [line for line in typed_lines(page) if not reason_not_run(page, line)]


def pages_to_run() -> list[Path]:
    """Every page with such a line but those of the newcomer; those that stand `IN_ORDER` last."""
    found: Iterable[Path] = (page for page in PAGES if lines_to_run(page) and name_of(page) not in NEWCOMER)
    places = {name: place for place, name in enumerate(IN_ORDER)}
    return sorted(found, key=lambda page: places.get(name_of(page), -1))
