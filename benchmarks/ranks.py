"""One process beside ranks on a CPU: `python benchmarks/ranks.py [--model DIR] [--ranks 1,2] [--steps 6] [--rounds 2]`.

The same run, of `builtin:tiny` or a model's folder, is trained by one process and by ranks: `parallel = "replicate"`,
and `"fsdp"` with `--lora-rank 0`. What a step took is the median of `step_time_s` in `metrics.jsonl`, without the first
`--warm-up` steps; processor seconds are those of the whole run with its start, all ranks together. All contenders have
the same `--threads`, which ranks divide: on a CPU a second rank brings no second device, as it does on GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(sys.executable).with_name("retrain")
CONFIG = """
[model]
model = "{model}"
lora_rank = {rank}
[backend]
backend = "local"
devices = "{devices}"
[backend.options]
parallel = "{parallel}"
[training]
seed = 1
max_steps = {steps}
batch_size = {batch}
group_size = {group}
max_tokens = {new}
lr = 1e-5
save_every = 0
[eval]
examples = 0
[data]
source = "arithmetic"
[reward]
type = "match"
[logging]
log_dir = "run"
"""


def main() -> None:
    """Measure all contenders in turn, and print a table."""
    args = _arguments()
    contenders = [("one process", 1, "split"), *(("replicate", n, "replicate") for n in args.ranks)]
    if not args.lora_rank:
        contenders += [("fsdp", n, "fsdp") for n in args.ranks]
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(args.rounds):
        for name, ranks, parallel in contenders:
            found.setdefault((name, ranks), []).append(_measured(args, ranks, parallel))
    print(
        f"{args.model}, lora_rank {args.lora_rank}, {args.threads} threads, {args.rounds} rounds of {args.steps} steps"
    )
    print("| | processes | step, s | against one | processor, s |\n|---|---|---|---|---|")
    alone = statistics.median(step for step, _ in found["one process", 1])
    for (name, ranks), rounds in found.items():
        step, processor = (statistics.median(each[at] for each in rounds) for at in range(2))
        print(f"| {name} | {ranks} | {step:.3f} | {alone / step:.2f} | {processor:.1f} |")


def _measured(args: argparse.Namespace, ranks: int, parallel: str) -> tuple[float, float]:
    """Median seconds of a step, and processor seconds of the run with its ranks."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"steps": args.steps, "batch": args.batch, "group": args.group, "new": args.new, "rank": args.lora_rank}
        devices = ",".join(["cpu"] * ranks)
        text = CONFIG.format(model=args.model, devices=devices, parallel=parallel, **sizes)
        (Path(folder) / "retrain.toml").write_text(text, encoding="utf-8")
        environ = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
        before = _processor_s()
        done = subprocess.run([SCRIPT], cwd=folder, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        lines = (Path(folder) / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        times = [line["step_time_s"] for line in map(json.loads, lines) if "step_time_s" in line][args.warm_up :]
        return statistics.median(times), _processor_s() - before


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[2])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    for name, default in (("steps", 6), ("rounds", 2), ("warm-up", 1), ("batch", 8), ("group", 16), ("new", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
