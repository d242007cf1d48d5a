"""One part of the GPU proof: `python gpu_part.py SETTINGS.json`.

Every figure is printed as soon as it is known, as a line `figure {"name": value}`; those that the settings say are
there already are not measured again. On a CPU the same code runs with small sizes: its figures mean nothing, but that
it works is known.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1]
sys.path.insert(0, str(BENCHMARKS))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from harness.limits import Shape, Work, decode, prefill, training  # noqa: E402
from harness.machine import ROOT, rates  # noqa: E402
from harness.models import endless_model  # noqa: E402
from harness.processes import watch  # noqa: E402
from harness.rounds import OFFLINE, run_one  # noqa: E402
from harness.runs import LINES, questions, write_config, write_tasks  # noqa: E402

FIGURE = "figure "
SHORT = 8  # tokens of the shorter of two calls whose difference is the time of a token step
CARD_BYTES = 16 * 10**9
POSITIONS = 40_960
KERNELS, NAME_CHARS = 40, 110  # of a table
PEER_ROWS = 4  # per backward pass of TRL
NONE_SELECTED = 5  # exit code of pytest
TAIL_CHARS = 20_000  # of the output of failed tests


class Figures:
    """What this part has found; `had` are the names of what an earlier attempt found."""

    def __init__(self, had: list[str]) -> None:
        self._had = set(had)

    def lacks(self, name: str) -> bool:
        """Whether this figure is still to be measured."""
        return name not in self._had

    def keep(self, name: str, **values: Any) -> None:
        """Hand a figure over."""
        print(FIGURE + json.dumps({name: values}, default=str) + "\n", end="", flush=True)


def clock() -> float:
    """Seconds, once the device has finished what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(work: Callable[[], object]) -> float:
    """Seconds that it takes."""
    start = clock()
    work()
    return clock() - start


def peak_gb() -> float | None:
    """The most memory that this process had on the device since the last call."""
    if not torch.cuda.is_available():
        return None
    peak = torch.cuda.max_memory_reserved() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return peak


def kernel_table(work: Callable[[], object]) -> dict[str, Any]:
    """Time in kernels against time in all, launches, and the kernels that take most (operations on a CPU)."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as seen:
        wall_s = timed(work)
    rows = []
    for event in seen.key_averages():
        own_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if own_us and (not on_gpu or str(event.device_type).endswith("CUDA")):
            rows.append((own_us / 1e6, event.count, event.key[:NAME_CHARS]))
    rows.sort(reverse=True)
    return {
        "wall_s": wall_s,
        "kernel_s": sum(row[0] for row in rows),
        "launches": sum(row[1] for row in rows),
        "kernels": rows[:KERNELS],  # seconds, launches, name
    }


class Bench:
    """A shape on a device, with the folder of its model, made once for all parts."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.device: str = settings["device"]
        self.name: str = settings["shape"]
        self.tables: dict[str, dict[str, Any]] = settings.get("tables", {})
        self.rank: int = settings.get("rank", 32)
        self.folder = Path(settings["folder"]).resolve() / self.name
        self.item = 4 if self.device == "cpu" else 2  # bytes of a weight

    def model(self) -> Path:
        """The folder of the model; a half-written one of an attempt that was cut off is made again."""
        ready = self.folder / "ready"
        if not ready.exists():
            shutil.rmtree(self.folder / "model", ignore_errors=True)
            folder = endless_model(self.folder / "model", shape=self.name, device=self.device)
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            config["max_position_embeddings"] = POSITIONS  # the part `memory` needs longer rows than the others
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            write_tasks(self.folder, questions(1))
            ready.touch()
        return self.folder / "model"

    def config(self, tables: dict[str, dict[str, Any]] | None = None) -> list[str]:
        """The command that trains with a configuration of this part; its last word is the file."""
        own: dict[str, dict[str, Any]] = {"model": {"model": str(self.model()), "lora_rank": self.rank}}
        for name, table in [*self.tables.items(), *(tables or {}).items()]:
            own[name] = own.get(name, {}) | table
        return write_config(self.folder / f"config-{os.getpid()}.toml", self.folder, self.device, own)

    def backend(self) -> Any:
        """Our backend, through the plugins."""
        from policy import _backend

        return _backend({"config": self.config()[-1]})

    def requests(self, batch: int, group: int, tokens: int) -> list[Any]:
        """Random prompts."""
        from retrain.api import SampleRequest

        stream = np.random.default_rng(0)
        vocabulary = Shape.read(self.model()).vocabulary
        return [
            SampleRequest(
                prompt_T=stream.integers(3, vocabulary, size=tokens),
                seeds_G=tuple(int(seed) for seed in stream.integers(0, 2**62, size=group)),
            )
            for _ in range(batch)
        ]

    def rows(self, batch: int, group: int, prompt: int, new: int) -> tuple[Any, ...]:
        """Rows of random tokens with advantages of both signs."""
        from retrain.api import TrainRow

        vocabulary, stream, rows = Shape.read(self.model()).vocabulary, random.Random(0), []
        for _ in range(batch):
            front = [stream.randrange(3, vocabulary) for _ in range(prompt)]
            for at in range(group):
                tokens = np.array(front + [stream.randrange(3, vocabulary) for _ in range(new)])
                action_T = np.arange(len(tokens)) >= prompt
                advantages_T = np.where(action_T, 1.0 if at % 2 else -1.0, 0.0)
                logprobs_T = np.where(action_T, -12.0, 0.0)
                rows.append(
                    TrainRow(tokens_T=tokens, action_T=action_T, logprobs_T=logprobs_T, advantages_T=advantages_T)
                )
        return tuple(rows)


def machine_rates(settings: dict[str, Any], found: Figures) -> None:
    """What the card does at most: by its data sheet, and measured."""
    command = [sys.executable, str(BENCHMARKS / "workers/rates.py"), settings["device"], "0", str(settings["bytes"])]
    if found.lacks("measured"):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.keep("measured", **json.loads(done.stdout))
    sheet = rates(settings["device"], settings["bytes"])
    found.keep(
        "taken for the limits",
        bytes_per_s=sheet.bytes_per_s,
        operations_per_s=sheet.operations_per_s,
        source=sheet.source,
    )


def tests(settings: dict[str, Any], found: Figures) -> None:
    """Every test file that needs a GPU, each in a process of its own, all at once: their models are tiny.

    A file is passed if some of its tests passed and none failed, or if it has only long ones; else the part fails.
    """
    files = [file for file in settings["files"] if found.lacks(file)]
    with ThreadPoolExecutor(len(files) or 1) as pool:
        is_passed = list(pool.map(lambda file: _test(file, found), files))
    if not all(is_passed):
        sys.exit("not passed: " + ", ".join(file for file, ok in zip(files, is_passed, strict=True) if not ok))


def _test(file: str, found: Figures) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "120", "--tb", "short"]
    command += ["-rfEs", "-m", "not long", file]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    ok = done.returncode == NONE_SELECTED or (done.returncode == 0 and "passed" in counts)
    seconds, tail = time.perf_counter() - start, "" if ok else done.stdout[-TAIL_CHARS:]
    reasons = re.findall(r"^(?:FAILED|ERROR|SKIPPED) .*", done.stdout, re.MULTILINE)
    found.keep(file, exit_code=done.returncode, ok=ok, seconds=seconds, **counts, not_passed=reasons, output=tail)
    return ok


def sampling(settings: dict[str, Any], found: Figures) -> None:
    """Time of a token step against the bytes that it must move, for several numbers of rows and contexts."""
    from retrain.api import SamplingParams

    bench = Bench(settings)
    shape = Shape.read(bench.model())
    peak = rates(bench.device, bench.item * (shape.projections + shape.head), 0 if bench.device == "cuda" else 1)
    # bytes of a key or value, as the tables of this part ask for
    kv_item = 1 if bench.tables.get("inference", {}).get("kv_cache_dtype") in ("fp8", "int8") else bench.item
    backend = bench.backend()
    engine = backend._engine
    new = settings["new"]

    def draw(asked: list[Any], count: int) -> object:
        return backend.sample(asked, SamplingParams(max_tokens=count, temperature=1.0, entropy=True))

    found.keep("engine", paged=type(engine._kernels.paged).__name__, packed=str(engine._kernels.packed))
    for batch, group, context in settings["sizes"]:
        rows, name = batch * group, f"{batch * group} x {context}"
        if not found.lacks(name):
            continue
        asked = bench.requests(batch, group, context)
        first_s, again_s = (timed(lambda asked=asked: draw(asked, new)) for _ in range(2))  # compiles, records
        engine.free_cache()
        after_free_s = timed(lambda asked=asked: draw(asked, new))
        seconds = {
            count: statistics.median(timed(lambda asked=asked, count=count: draw(asked, count)) for _ in range(3))
            for count in (SHORT, new)
        }
        step_s = (seconds[new] - seconds[SHORT]) / (new - SHORT)
        weights = bench.item * (shape.projections + shape.head)
        moved = weights + (batch * context + rows * (new + SHORT) / 2) * shape.kv_bytes(
            kv_item
        )  # a group shares its prompt
        found.keep(
            name,
            rows=rows,
            context=context,
            step_ms=1e3 * step_s,
            least_ms=1e3 * moved / peak.bytes_per_s,
            weights_ms=1e3 * weights / peak.bytes_per_s,
            fraction=moved / peak.bytes_per_s / step_s,
            first_s=first_s,
            again_s=again_s,
            after_free_s=after_free_s,
            graphs=len(engine._graphs),
            pool_tokens=engine._policy.limits.pool_tokens or engine._policy.limits.cache_tokens,
            peak_gb=peak_gb(),
        )
    if found.lacks("kernels"):
        asked = bench.requests(*settings["sizes"][0])
        draw(asked, new)
        found.keep("kernels", **kernel_table(lambda: draw(asked, new)))
    backend.close()


def optimizing(settings: dict[str, Any], found: Figures) -> None:
    """Time of an optimizer step against the operations that it must do."""
    from retrain.api import TrainBatch

    bench = Bench(settings)
    shape = Shape.read(bench.model())
    batch, group, prompt, new = settings["size"]
    peak = rates(bench.device, 2**30, 0 if bench.device == "cuda" else 1)
    backend = bench.backend()
    few, whole = bench.rows(1, min(group, 8), prompt, new), bench.rows(batch, group, prompt, new)

    def step(rows: tuple[Any, ...]) -> object:
        return backend.train(TrainBatch(step=0, rows=rows, temperature=1.0))

    if found.lacks("step"):
        first_s = timed(lambda: step(few))  # compiles, decides the packs
        least = training(shape, [(prompt, new)] * len(whole), bench.rank, bench.item, groups=batch)
        step_s = [timed(lambda: step(whole)) for _ in range(settings["steps"])]
        limits = backend._trainer._limits
        found.keep(
            "step",
            step_s=step_s,
            mfu=least.operations / min(step_s) / peak.operations_per_s,
            tflop=least.operations / 1e12,
            first_s=first_s,
            pack_tokens=limits.pack_tokens,
            recompute=limits.recompute,
            peak_gb=peak_gb(),
        )
    if found.lacks("kernels"):
        step(few)
        found.keep("kernels", **kernel_table(lambda: step(few)))
    if found.lacks("logprobs"):
        found.keep("logprobs", seconds=timed(lambda: backend.logprobs(whole, 1.0)))
    backend.close()


def generating(settings: dict[str, Any], found: Figures) -> None:
    """Time of a token step of transformers' `generate`, with the same rows and contexts."""
    from transformers import AutoModelForCausalLM

    bench = Bench(settings)
    dtype = torch.float32 if bench.device == "cpu" else torch.bfloat16
    llm = AutoModelForCausalLM.from_pretrained(bench.model(), dtype=dtype).to(bench.device).eval()
    new = settings["new"]
    for batch, group, context in settings["sizes"]:
        rows, name = batch * group, f"{batch * group} x {context}"
        if not found.lacks(name):
            continue
        ids = torch.randint(3, llm.config.vocab_size, (rows, context), device=bench.device)

        @torch.no_grad()  # type: ignore[untyped-decorator]
        def draw(count: int, ids: torch.Tensor = ids) -> None:
            sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
            sizes = {"max_new_tokens": count, "min_new_tokens": count}
            llm.generate(ids, attention_mask=torch.ones_like(ids), **sampling, **sizes)

        draw(SHORT)
        seconds = [timed(lambda count=count: draw(count)) for count in (SHORT, new)]
        found.keep(name, rows=rows, context=context, step_ms=1e3 * (seconds[1] - seconds[0]) / (new - SHORT))


def whole_step(settings: dict[str, Any], found: Figures) -> None:
    """Steps of `retrain` itself, seen from outside, against the sum of the two limits."""
    if not found.lacks("step"):
        return
    bench = Bench(settings)
    shape = Shape.read(bench.model())
    batch, group, prompt, new = settings["size"]
    steps = settings["steps"] + 1  # the first compiles and records
    write_tasks(bench.folder, questions(batch * steps, prompt))
    sizes = {"batch_size": batch, "group_size": group, "max_tokens": new, "max_steps": steps}
    place = bench.folder / f"run-{os.getpid()}"
    run = watch(bench.config({"training": sizes}), folder=place, lines=LINES, environ=OFFLINE, device=bench.device)
    peak = rates(bench.device, bench.item * (shape.projections + shape.head), 0 if bench.device == "cuda" else 1)
    work = Work(rows=batch * group, group=group, prompt=prompt, new=new)
    drawn_s = decode(shape, work, bench.item).seconds(peak) + prefill(shape, work, bench.item).seconds(peak)
    rows = [(prompt, new)] * work.rows
    trained_s = training(shape, rows, bench.rank, bench.item, groups=batch).seconds(peak)
    periods = run.periods_s(1)
    found.keep(
        "step",
        step_s=periods,
        first_s=run.seen_s[0],
        sample_s=[record["sample_time_s"] for record in run.records[1:]],
        train_s=[record["train_time_s"] for record in run.records[1:]],
        sample_limit_s=drawn_s,
        train_limit_s=trained_s,
        times_the_limit=statistics.median(periods) / (drawn_s + trained_s),
        device_gb=None if run.device_bytes is None else run.device_bytes / 1e9,
    )


def peer_step(settings: dict[str, Any], found: Figures) -> None:
    """The same step of TRL's GRPOTrainer, whose backward passes take four rows each."""
    from step import peer

    if not found.lacks("step"):
        return
    bench = Bench(settings)
    model = str(bench.model())
    batch, group, prompt, new = settings["size"]
    steps = settings["steps"] + 1
    write_tasks(bench.folder, questions(batch * steps, prompt))
    asked = Namespace(device=bench.device, dtype="auto", rank=bench.rank, batch=batch, group=group, new=new)
    asked.peer_rows, asked.peer_python = PEER_ROWS, sys.executable
    contender = peer("TRL", asked, bench.folder, model, steps)
    run = run_one(contender, bench.folder / f"peer-{os.getpid()}", bench.device)
    found.keep("step", step_s=run.periods_s(1), first_s=run.seen_s[0])


def memory(settings: dict[str, Any], found: Figures) -> None:
    """A step of long rows within 16 GB: many completions at once, a few to their very end, then training on as long."""
    from retrain.api import SamplingParams, TrainBatch

    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, CARD_BYTES / total), 0)
    bench = Bench(settings)
    batch, group, prompt, new = settings["size"]
    backend = bench.backend()
    if found.lacks("sampled"):
        seconds = timed(
            lambda: backend.sample(
                bench.requests(batch, group, prompt), SamplingParams(max_tokens=new // 20, temperature=1.0)
            )
        )
        few = bench.requests(1, 4, prompt)
        long_s = timed(lambda: backend.sample(few, SamplingParams(max_tokens=new, temperature=1.0)))
        found.keep("sampled", many_s=seconds, long_s=long_s, tokens=new, peak_gb=peak_gb())
    if found.lacks("trained"):
        rows = bench.rows(1, 4, prompt, new)  # each is a pack of its own: more rows take no more memory
        seconds = timed(lambda: backend.train(TrainBatch(step=0, rows=rows, temperature=1.0)))
        limits = backend._trainer._limits
        found.keep(
            "trained", seconds=seconds, pack_tokens=limits.pack_tokens, recompute=limits.recompute, peak_gb=peak_gb()
        )
    backend.publish()
    backend.close()


def main() -> None:
    """Do the part that the settings name."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    kinds = (machine_rates, tests, sampling, optimizing, generating, whole_step, peer_step, memory)
    {kind.__name__: kind for kind in kinds}[settings["kind"]](settings, Figures(settings["had"]))


if __name__ == "__main__":
    main()
