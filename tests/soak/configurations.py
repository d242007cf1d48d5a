"""What is soaked: small runs and campaigns of `builtin:tiny`, each with some of what the trainer can do."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

PARTS = Path(__file__).with_name("parts.py")
CAMPAIGN, RUN = "campaign.toml", "retrain.toml"
Tables = dict[str, dict[str, Any]]
ALGORITHMS: tuple[dict[str, Any], ...] = (
    {"advantage_mode": "grpo", "transform_mode": "none"},
    {"advantage_mode": "maxrl", "transform_mode": "gtpo_sepa"},
    {"advantage_mode": "grpo", "transform_mode": "gtpo_hicra"},
    {"advantage_mode": "rloo", "transform_mode": "none", "loss": "gspo"},
    {"recipe": "dapo"},
)
THOMPSON = {"sampler": "thompson", "sampler_params": {"explore": 0.2}}
REPLAY = {"sampler": "replay", "sampler_params": {"share": 0.5, "least_chance": 0.1}}
CURRICULUM = {"sampler": "curriculum", "sampler_params": {"moves_by": "rate", "moves": 3, "target": 0.3}}
SHADOWED: Tables = {"reward": {"shadow": "parts.Shadow"}}
EXTRAS: tuple[Tables, ...] = (
    {"training": {"overlong": "mask", "soft_overlong": 6}},
    {"kl": {"coef": 0.05}},
    {"kl": {"coef": 0.05, "where": "reward"}},
    {"optimizer": {"schedule": "cosine", "warmup_steps": 2}},
    {"training": {"keep_last": 2}},
    {"lora": {"rslora": True}},
    {"logging": {"recorders": ["parts.Recorder"]}},
    SHADOWED,
    {"data": THOMPSON},
    {"data": REPLAY},
    {"data": CURRICULUM},
)
NOT_WITH = {"full": {"lora"}, "game": {"data", "reward"}}  # an environment has tasks and a verifier of its own
SHAPES: Mapping[str, Tables] = {
    "plain": {},
    "split": {"backend": {"devices": "cpu,cpu"}},
    "ahead": {"backend": {"devices": "cpu,cpu"}, "training": {"max_staleness": 2}},
    "ranks": {"backend": {"devices": "cpu,cpu", "options": {"parallel": "replicate"}}},
    "refill": {"training": {"refill": 3}},
    "warm": {"sft": {"steps": 3, "batch_size": 8}},
    # by default all weights are kept of two checkpoints alone, and which these are a signal decides
    "full": {"model": {"lora_rank": 0}, "training": {"lr": 1e-3, "keep_last": 20}},
    "server": {"inference": {"engine": "vllm", "retry_s": 300.0, "timeout_s": 60.0}},
    "game": {"environment": {"provider": "parts.Game", "timeout_s": 5.0}},
    "agent": {"environment": {"provider": "agent", "id": "parts:play", "args": {"concurrency": 1}, "timeout_s": 5.0}},
    "shadow": SHADOWED,
    "thompson": {"data": THOMPSON},
    "thompson ahead": {"data": THOMPSON, "backend": {"devices": "cpu,cpu"}, "training": {"max_staleness": 2}},
    "replay": {"data": REPLAY, "training": {"refill": 2}},
    "curriculum": {"data": CURRICULUM, "backend": {"devices": "cpu,cpu"}},
    "campaign": {"campaign": {"seeds": [3], "parallel": True, "max_workers": 2}, "data": THOMPSON, **SHADOWED},
    "campaign in turn": {"campaign": {"seeds": [3]}, "data": REPLAY, **SHADOWED},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A name, and the tables of its TOML."""

    name: str
    shape: str
    tables: Tables

    @property
    def is_campaign(self) -> bool:
        """Many runs, or one."""
        return "campaign" in self.tables

    @property
    def num_steps(self) -> int:
        return int(self.tables["training"]["max_steps"])

    @property
    def num_records(self) -> int:
        """Lines that `metrics.jsonl` has in the end; of every run."""
        warm_up = int(self.tables.get("sft", {}).get("steps", 0))
        return self.num_steps + warm_up + (1 if self.evaluates else 0)

    @property
    def evaluates(self) -> bool:
        """There are evaluations, in which a score that failed counts as wrong."""
        return bool(self.tables["eval"]["examples"])

    def write(self, folder: Path, urls: Sequence[str] = ()) -> None:
        """The TOML and what it names; `urls` of the servers, where it has some."""
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(PARTS, folder / PARTS.name)
        rows = "".join(json.dumps(row) + "\n" for row in _rows())
        (folder / "sums.jsonl").write_text(rows, encoding="utf-8")
        name = CAMPAIGN if self.is_campaign else RUN
        tables = (
            {**self.tables, "inference": {**self.tables["inference"], "url": ",".join(urls)}} if urls else self.tables
        )
        (folder / name).write_text(tomli_w.dumps(tables), encoding="utf-8")


def _rows() -> list[dict[str, Any]]:
    """Sums of which about a third each is right whatever is answered, wrong whatever is answered, and as it is."""
    pairs = [(a, b) for a in range(2, 10) for b in range(2, 10)]
    answers = [("any", "never", str(a + b))[(3 * a + b) % 3] for a, b in pairs]
    sums = zip(pairs, answers, strict=True)
    return [{"prompt": f"What is {a} + {b}?", "answer": answer, "difficulty": a + b} for (a, b), answer in sums]


def pool_of(seed: int) -> list[Configuration]:
    return [_drawn(shape, random.Random(f"{seed} {shape}")) for shape in SHAPES]


def _drawn(shape: str, stream: random.Random) -> Configuration:
    tables: Tables = {
        "model": {"model": "builtin:tiny", "lora_rank": 4},
        "backend": {"devices": "cpu"},
        "algorithm": dict(stream.choice(ALGORITHMS)),
        "training": {
            "seed": stream.randrange(1000),
            "max_steps": stream.randint(6, 10),
            "batch_size": stream.randint(2, 4),
            "group_size": 6,
            "max_tokens": stream.choice((16, 24)),
            "temperature": 1.0,
            "lr": 3e-3,
            "save_every": stream.randint(1, 3),
            "grace_s": 60.0,
        },
        "data": {"source": "files", "path": "sums.jsonl"},
        "reward": {"type": "parts.Reward"},
        "scoring": {"workers": 2, "timeout_s": 2.0, "max_failed_frac": 0.0, "audit": "off"},
        "eval": {"examples": stream.choice((0, 3)), "samples": 2, "every": 2},
        "logging": {"log_dir": "run"},
    }
    _add(tables, SHAPES[shape])
    clashes = NOT_WITH.get(shape, set()) | ({"data"} & SHAPES[shape].keys())
    for extra in stream.sample(EXTRAS, 3):
        if not clashes & extra.keys():
            _add(tables, extra)
    if "campaign" in tables:
        _make_campaign(tables, stream)
    return Configuration(name=shape.replace(" ", "-"), shape=shape, tables=tables)


def _make_campaign(tables: Tables, stream: random.Random) -> None:
    steps = tables["training"]["max_steps"] // 2
    tables["training"]["max_steps"] = tables["campaign"]["max_steps"] = steps
    tables["campaign"]["conditions"] = [dict(condition) for condition in stream.sample(ALGORITHMS[:3], 2)]


def _add(tables: Tables, more: Tables) -> None:
    for name, keys in more.items():
        tables.setdefault(name, {}).update(keys)
