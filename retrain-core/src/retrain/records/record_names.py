"""Names of the files and folders that a run and a campaign leave on disk; no other module spells them."""

from __future__ import annotations

from pathlib import Path

RUN_FILE = "run.json"  # what ran: configuration, versions, seed, how it ended
CONFIG_FILE = "config.toml"  # the resolved configuration; it reproduces the run
METRICS = "metrics.jsonl"  # a line per step, and one of the evaluation before training
EVALUATION = "eval.jsonl"  # a line per held-out example and evaluation
EMERGENCE = "emergence"  # the folder of completions and tokens
STEPS = f"{EMERGENCE}/steps.jsonl"  # a summary per step
GENERATIONS = f"{EMERGENCE}/generations.jsonl"  # a line per completion
TOKENS = f"{EMERGENCE}/tokens"  # a file per step
TOKEN_FILES = f"{EMERGENCE}/token_files.jsonl"  # size and checksum of each step's token file
TRAINER_STATE = "trainer_state.json"  # the last checkpoint's counters, for other tools
ADAPTERS = "adapter"  # the folder of checkpoints, unless [backend] adapter_path names another
HEARTBEAT = "heartbeat.json"
STACKS = "stacks.txt"
GAMING = "gaming.jsonl"
FILES = (METRICS, STEPS, GENERATIONS, TOKEN_FILES, EVALUATION)  # grow by lines; a resume cuts them to its checkpoint

PATHS = "paths"  # in `run.json` and a campaign's manifest: where the paths of the configuration led

CAMPAIGN_FILE = "manifest.json"  # a campaign's runs and plan
CAMPAIGN_CONTENT = "campaign.json"  # every value of every condition
RUNS = "runs"  # the folder of a campaign's runs
TUNING = "tuning"  # the folder of its tuning runs, a campaign as well


def token_file(run: Path, step: int) -> Path:
    return run / TOKENS / f"step_{step:06d}.safetensors"
