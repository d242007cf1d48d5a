"""How fast credit is: `python benchmarks/credit.py [--peer PYTHON] [--json FILE]`.

Times the credit of 128 completions x 10,240 tokens through maxrl+gtpo_sepa on one core, without planning detection; the
same at ten times the size; one call of `compute_composable_advantages` for a group of 16; and the regex planning
detector in tokens per second. With `--peer`, the interpreter of an environment that holds the public `retrain==0.3.0`
computes the credit of the same input in its own process, and the ratio of the two medians is printed. Run it on a quiet
machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from retrain.advantages import compute_composable_advantages
from retrain.api import Kind, PluginContext, Seeds, load_plugins, resolve
from retrain.credit.flow import CreditFlow, build_flow
from retrain.credit.pipeline import CreditGroup, assign_credit
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import AlgorithmTable

GROUPS, GROUP_SIZE, TOKENS = 8, 16, 10_240
FLOW = AlgorithmTable(advantage_mode="maxrl", transform_mode="gtpo_sepa", uncertainty_kind="surprisal")
SEPA_LAMBDA = 0.5
REPEATS = 9
TEXT = (
    "We add the two numbers, 37 + 48. Wait, let me check that: 7 + 8 = 15, carry the one, and 3 + 4 + 1 = 8. "
    "That's not right for the other case; on second thought, the key is to look at the signs. So the sum equals 85. "
)
PEER = """
import json, statistics, sys, time
import numpy as np
from retrain.advantages import compute_composable_advantages
data = np.load(sys.argv[1])
groups = range(int(data["groups"]))
inputs = [
    (data[f"r{g}"].tolist(), data[f"l{g}"].tolist(), data[f"p{g}"].astype(int).tolist())
    for g in groups
]
times = []
for _ in range(3):
    started = time.perf_counter()
    for rewards, logprobs, planning in inputs:
        result = compute_composable_advantages(
            rewards, logprobs, planning, advantage_mode="maxrl", transform_mode="gtpo_sepa",
            gtpo_beta=0.1, sepa_lambda=float(data["sepa_lambda"]),
        )
    times.append(time.perf_counter() - started)
print(json.dumps({"median_s": statistics.median(times), "last": list(map(float, result.token_advs[-1][:4]))}))
"""


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="interpreter of an environment with the public retrain==0.3.0")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    plugins = load_plugins()
    flow = build_flow(Config(tables={"algorithm": FLOW}), plugins)
    figures: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    groups = make_groups(TOKENS)
    figures["credit_s"] = median_s(lambda: assign_credit(groups, flow, sepa_lambda=SEPA_LAMBDA))
    tenfold = make_groups(10 * TOKENS)
    figures["credit_tenfold_s"] = median_s(lambda: assign_credit(tenfold, flow, sepa_lambda=SEPA_LAMBDA))
    figures["credit_growth_exponent"] = float(np.log10(figures["credit_tenfold_s"] / figures["credit_s"]))
    figures["one_call_s"] = median_s(lambda: one_call(groups[0]))
    figures |= detector_speed(plugins)
    if options.peer:
        figures |= peer_speed(options.peer, groups, flow, figures["credit_s"])
    for name, value in figures.items():
        print(f"{name:<28} {value:.6g}" if isinstance(value, float) else f"{name:<28} {value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def make_groups(tokens: int) -> list[CreditGroup]:
    """A step of seeded synthetic completions, a twentieth of their tokens planning."""
    stream = Seeds(0).stream("benchmark")
    return [
        CreditGroup(
            rewards_G=(stream.random(GROUP_SIZE) < 0.4).astype(np.float64),
            logprobs_G=list(-stream.exponential(0.4, size=(GROUP_SIZE, tokens))),
            planning_G=list(stream.random((GROUP_SIZE, tokens)) < 0.05),
            name=f"group {number}",
        )
        for number in range(GROUPS)
    ]


def one_call(group: CreditGroup) -> None:
    """The credit of one group as a notebook computes it: names, plugins and all."""
    compute_composable_advantages(group.rewards_G, group.logprobs_G, group.planning_G, sepa_lambda=SEPA_LAMBDA)


def detector_speed(plugins: Any) -> dict[str, float | int]:
    """Tokens per second of the regex detector on a byte-level tokenizer, all completions in one call."""
    tokenizer = _tokenizer()
    ids = tokenizer(TEXT * 400)["input_ids"][:TOKENS]
    completions = [np.roll(np.array(ids, dtype=np.int64), shift) for shift in range(32)]
    context = PluginContext(config=Config(tables={}), seeds=Seeds(0), plugins=plugins, tokenizer=tokenizer)
    detector = resolve(plugins, Kind.PLANNING_DETECTOR, "regex", where="benchmark").target(context)
    seconds = median_s(lambda: detector.masks(completions))
    total = sum(len(completion) for completion in completions)
    return {"detector_tokens_per_s": total / seconds, "detector_tokens": total}


def peer_speed(python: str, groups: list[CreditGroup], flow: CreditFlow, ours_s: float) -> dict[str, float]:
    """Seconds of the public package on the same input, the ratio, and how far the two results are apart."""
    arrays: dict[str, Any] = {"groups": len(groups), "sepa_lambda": SEPA_LAMBDA}
    for number, group in enumerate(groups):
        arrays |= {
            f"r{number}": group.rewards_G,
            f"l{number}": np.stack(group.logprobs_G),
            f"p{number}": np.stack(group.planning_G),
        }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "groups.npz"
        np.savez(file, **arrays)
        done = subprocess.run([python, "-c", PEER, str(file)], capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        sys.exit(f"the peer failed:\n{done.stderr}")
    peer = json.loads(done.stdout.splitlines()[-1])
    ours = assign_credit(groups[-1:], flow, sepa_lambda=SEPA_LAMBDA).token_advs[0][-1][:4]
    return {
        "peer_s": peer["median_s"],
        "ratio_peer_to_ours": peer["median_s"] / ours_s,
        "largest_difference": float(np.abs(np.array(peer["last"]) - ours).max()),
    }


def median_s(work: Callable[[], object]) -> float:
    """Median time of a call after one warm-up."""
    work()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


if __name__ == "__main__":
    main()
