"""A step of each tier, beside TRL's and transformers' `generate`: `python benchmarks/tiers.py [--only lfm2]`.

Random models of about 30 M parameters, fp32 on a CPU, all completions `--new` tokens long. The step is `step.py`'s,
sampling is its part before training, `generate` draws as many tokens from one batch and one cache.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import report
from harness.figures import ratios
from harness.limits import Work
from harness.machine import machine
from harness.models import builtin_folder, endless_model
from harness.rounds import add_only, chosen, run_rounds
from harness.runs import PLAIN_PROMPT, questions, write_tasks
from peers.environment import peer_python
from sample import GENERATE, call_figures, contender
from step import OURS, PEER_NAME, figures_of, ours, peer

VOCABULARY = 16_384
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
MIXTURE = {"num_hidden_layers": 6, "num_experts_per_tok": 2}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2, "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": {
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "granitemoehybrid": {
        "layer_types": [*["mamba"] * 3, "attention"] * 2,
        "mamba_n_heads": 16,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 1408,
    },
    "nemotron_h": {
        "layer_types": ["linear_attention", "mlp", "linear_attention", "mlp", "full_attention", "mlp"] * 2,
        "mamba_num_heads": 16,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "n_groups": 1,
    },
    "gpt_oss": MIXTURE | {"intermediate_size": 384, "num_local_experts": 8, "max_position_embeddings": 131_072},
    "qwen3_moe": MIXTURE | {"moe_intermediate_size": 256, "num_experts": 8},
    "deepseek_v32": MIXTURE
    | {
        "num_key_value_heads": 8,
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 64,
        "index_head_dim": 64,
        "index_n_heads": 4,
        "index_topk": 64,
        "moe_intermediate_size": 256,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
# PEFT refuses an adapter of these in Mamba; ours leaves them out, too.
EXCLUDED = {"nemotron_h": ["out_proj"]}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def main() -> None:
    """Measure, print, write."""
    options = _options()
    where, failures = machine("cpu", options.peer_python), dict[str, str]()
    found: dict[str, dict[str, Any]] = {}
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as scratch:
            measured = _measured(kind, options, Path(scratch))
        failures |= {f"{kind}, {name}": why for name, why in measured.pop("failures").items()}
        if measured:
            found[kind] = measured
            print(*_row(kind, measured), sep=" | ", file=sys.stderr, flush=True)
    report.Report(
        name="tiers",
        columns=("", "tier", "parameters", "step", "TRL's", "ours / TRL's", "sampling", "generate's", "ours / its"),
        rows=[_row(kind, figures) for kind, figures in found.items()],
        notes=(
            f"Random models, fp32, {options.batch} x {options.group} completions of {options.new} tokens after prompts",
            f"of {PLAIN_PROMPT}, fixed lengths; medians of {options.steps} steps or calls with quartiles, rounds:",
            f"{options.rounds}; ratios of medians over rounds.",
        ),
        figures={"settings": report.settings(options), "types": found},
        machine=where,
        failures=failures,
    ).publish(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="prompts per step")
    parser.add_argument("--group", type=int, default=8, help="completions per prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens per completion")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each, over all rounds")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=1, help="steps at the start of each process that do not count")
    parser.add_argument("--peer-python", default="", help="an interpreter that has TRL; else an environment is made")
    add_only(parser, tuple(KINDS))
    parser.add_argument("--quick", action="store_true", help="a small run that shows that everything works")
    report.add_output_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.batch, options.group, options.new = 2, 4, 8
        options.steps, options.rounds, options.warm_up = 2, 1, 1
    options.kinds = chosen(options.only, tuple(KINDS))
    options.peer_python = peer_python(PEER_NAME.lower(), options.peer_python)
    fixed = {"device": "cpu", "dtype": "fp32", "shape": "tiny", "prompt": PLAIN_PROMPT, "threads": 0}
    fixed |= {"server_python": "", "peer_rows": options.batch * options.group}
    fixed |= {"calls": options.steps // options.rounds}
    vars(options).update(fixed)
    return options


def _measured(kind: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    parameters = _make(kind, folder / "made")
    model = endless_model(folder / "model", model=str(folder / "made"))
    steps = options.warm_up + options.steps // options.rounds
    write_tasks(folder, questions(options.batch * steps))
    contenders = [
        ours(OURS, options, folder, model, steps),
        peer(PEER_NAME, options, folder, str(model), steps, exclude_modules=EXCLUDED.get(kind)),
        contender(GENERATE, options, folder, model, VOCABULARY),
    ]
    done = run_rounds(contenders, options.rounds, folder / "runs", "cpu")
    if OURS not in done.runs:
        return {"failures": done.failures}
    found: dict[str, Any] = {"parameters": parameters, "tier": _tier(folder / f"{OURS}.toml")}
    found |= {name: figures_of(runs, options) for name, runs in done.runs.items() if name != GENERATE}
    sampled_s = [[record["sample_time_s"] for record in run.records[options.warm_up :]] for run in done.runs[OURS]]
    if PEER_NAME in done.runs:
        found["of_peer"] = ratios(found[PEER_NAME]["rounds_s"], found[OURS]["rounds_s"])
    if GENERATE in done.runs:
        work = Work(rows=options.batch * options.group, group=options.group, prompt=PLAIN_PROMPT, new=options.new)
        found[GENERATE] = call_figures(done.runs[GENERATE], work, None)
        found["of_generate"] = ratios(found[GENERATE]["rounds_s"], sampled_s)
    return found | {"failures": done.failures}


def _make(kind: str, folder: Path) -> int:
    """Write a random model with the built-in tokenizer; returns its parameters."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    made = CONFIG_MAPPING[kind]
    known = {name for base in made.__mro__ for name in getattr(base, "__annotations__", {})} - set(made.attribute_map)
    config = made(**{name: value for name, value in (SIZES | ENDS).items() if name in known} | KINDS[kind])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(builtin_folder() / file, folder)
    return sum(p.numel() for p in model.parameters())


def _tier(file: Path) -> str:
    command = [sys.executable, "-m", "retrain", "explain", str(file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return str(json.loads(done.stdout).get("model_tier", "-").partition(",")[0])


def _row(kind: str, figures: dict[str, Any]) -> list[str]:
    drawn, stepped = figures.get(GENERATE), figures.get(PEER_NAME)
    return [
        kind,
        figures["tier"],
        f"{figures['parameters'] / 1e6:.1f} M",
        report.seconds(figures[OURS]["step_s"]),
        report.seconds(stepped["step_s"]) if stepped else "failed",
        report.times(figures.get("of_peer")),
        report.seconds(figures[OURS]["sample_s"]),
        report.seconds(drawn["call_s"]) if drawn else "failed",
        report.times(figures.get("of_generate")),
    ]


if __name__ == "__main__":
    main()
