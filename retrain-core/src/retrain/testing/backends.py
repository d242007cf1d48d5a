"""The suite of backends: sampling, training, a repeatable run, exact checkpoints, and true declarations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from retrain.kernel.declared import Capabilities, CheckpointMode, Determinism
from retrain.kernel.errors import BackendError
from retrain.testing.bench import Bench
from retrain.testing.check import expect, fail
from retrain.testing.subjects import Sampled, Subject, backend_subject, batch_of, open_subject, plain, requests, sampled

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def repeats_a_run(bench: Bench) -> None:
    """Two instances with one seed sample, train and sample bit for bit the same, if that is declared."""
    subject = open_subject(bench)
    if subject.capabilities is None or subject.capabilities.determinism is Determinism.NONE:
        return
    first = [_step(bench, subject, step) for step in range(2)]
    other = backend_subject(bench)
    again = [_step(bench, other, step) for step in range(2)]
    differing = (
        f"completion {number} of step {step}"
        for step, (one, two) in enumerate(zip(first, again, strict=True))
        for number, (a, b) in enumerate(zip(one, two, strict=True))
        if a != b
    )
    expect(
        first == again,
        f"two runs with seed {bench.config.training.seed} differ from {next(differing, '')} on",
        why=f"determinism is declared as {subject.capabilities.determinism.value}",
        fix="draw every random number from context.seeds, before any weight is made; or declare none",
    )


def goes_on_from_a_checkpoint(bench: Bench) -> None:
    """A fresh backend that loads what `save` wrote continues like an uninterrupted run, as declared."""
    subject = open_subject(bench)
    found = subject.capabilities
    if found is None or not found.supports_checkpoint_resume:
        return
    _step(bench, subject, 0)
    folder = _empty(bench, "state")
    subject.part.save(folder)
    resumed = backend_subject(bench)
    resumed.part.load(folder)
    version, wanted = resumed.part.publish(), subject.part.publish()
    why, fix = "it counts the optimizer steps in the policy", "save and load the count"
    expect(version == wanted, f"the version is {version} after load, it was {wanted} at save", why=why, fix=fix)
    if found.determinism is Determinism.NONE:
        return
    # Two steps: lost moments of the optimizer change the weights of the first and the samples of the second.
    count = 2 if found.checkpoint_resume_mode is CheckpointMode.EXACT else 0
    for step in range(1, 1 + count):
        one, two = _step(bench, subject, step), _step(bench, resumed, step)
        why = "checkpoint_resume_mode is declared as exact"
        fix = "save the optimizer's moments and its step count with the adapter; or declare adapter_only"
        expect(one == two, f"step {step} after a resume differs from the uninterrupted one", why=why, fix=fix)
    expect(
        sampled(bench, subject) == sampled(bench, resumed),
        "other completions after save and load",
        why=f"checkpoint_resume_mode is declared as {found.checkpoint_resume_mode.value}",
        fix="save and load every trained weight, without rounding",
    )


def saving_changes_nothing(bench: Bench) -> None:
    """`save` and `save_adapter` leave policy and optimizer observably unchanged."""
    subject = open_subject(bench)
    found = subject.capabilities
    if found is None or found.determinism is Determinism.NONE or not found.supports_checkpoint_resume:
        return
    other = backend_subject(bench)
    for step in range(2):
        for each in (subject, other):
            _step(bench, each, step)
        other.part.save(_empty(bench, f"state-{step}"))
        other.part.save_adapter(_empty(bench, f"adapter-{step}"))
    expect(
        sampled(bench, subject) == sampled(bench, other),
        "a run that saves after each step samples different completions from one that does not",
        why="save_every must not change the experiment",
        fix="save copies, and touch neither weights nor optimizer",
    )


def writes_a_peft_adapter(bench: Bench) -> None:
    """`save_adapter` writes the two files that PEFT and inference servers read, before and after training."""
    subject = open_subject(bench)
    for number in range(2):
        folder = _empty(bench, f"peft-{number}")
        subject.part.save_adapter(folder)
        _expect_peft_files(folder)
        _step(bench, subject, number)


def _empty(bench: Bench, name: str) -> Path:
    folder = bench.folder / name
    folder.mkdir()
    return folder


def _step(bench: Bench, subject: Subject, step: int) -> Sampled:
    """Sample, train on the samples with seeded credit, publish; return the samples."""
    asked = requests(bench)
    samples = subject.sample(asked)
    batch = batch_of(
        asked, samples, lambda sample: (-1.0) ** (int(sample.tokens_T[0]) + len(sample.tokens_T)), step=step
    )
    subject.part.train(batch)
    subject.part.publish()
    return plain(samples)


def _expect_peft_files(folder: Path) -> None:
    """Expect configuration and weights that PEFT, vLLM and SGLang can read, and nothing that needs unpickling."""
    why = "PEFT, inference servers, squeeze and the hub read exactly these two files"
    fix = "write what peft's save_pretrained(folder, safe_serialization=True) writes"
    found = sorted(path.name for path in folder.rglob("*"))
    for name in (CONFIG, WEIGHTS):
        expect((folder / name).is_file(), f"save_adapter wrote {found}, and no {name}", why=why, fix=fix)
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        is_lora = config["peft_type"] == "LORA"
        rank = config["r"] if is_lora else 1
    except (ValueError, KeyError, TypeError) as error:
        fail(f"{CONFIG} is not a PEFT configuration: {error!r}", why=why, fix=fix)
    expect(isinstance(rank, int) and rank > 0, f"{CONFIG} has r = {rank!r}", why=why, fix=fix)
    try:
        with safe_open(folder / WEIGHTS, framework="numpy") as file:
            names = list(file.keys())
    except (SafetensorError, OSError) as error:
        fail(f"{WEIGHTS} cannot be read: {error}", why=why, fix=fix)
    expect(names, f"{WEIGHTS} contains no tensor", why=why, fix=fix)
    foreign = [name for name in names if is_lora and ".lora_" not in name]
    expect(not foreign, f"{WEIGHTS} contains {foreign[:2]}: not tensors of a LoRA adapter", why=why, fix=fix)


def declares_its_capabilities(bench: Bench) -> None:
    """The traits of its registration equal the `capabilities` of the object and are consistent."""
    found: Any = backend_subject(bench).capabilities
    why, fix = "the kernel reads them before it samples", "set capabilities = Capabilities(...) on the class"
    expect(isinstance(found, Capabilities), f"capabilities is {type(found).__name__}", why=why, fix=fix)
    can_resume = found.checkpoint_resume_mode is not CheckpointMode.UNSUPPORTED
    expect(
        found.supports_checkpoint_resume == can_resume,
        f"supports_checkpoint_resume is {found.supports_checkpoint_resume}, the mode {found.checkpoint_resume_mode}",
        why="one of the two is wrong",
        fix="UNSUPPORTED goes with False, the other modes with True",
    )
    if bench.plugins.find(bench.kind, bench.name):
        expect(
            bench.found.traits == found,
            f"registered with traits {bench.found.traits}, the object has {found}",
            why="configurations that need more are refused by the traits, before anything heavy loads",
            fix="register PluginSpec(..., traits=CAPABILITIES) with the very record that the object has",
        )


def is_closed_for_good(bench: Bench) -> None:
    """Every call after `close` raises BackendError."""
    subject, asked = open_subject(bench), requests(bench)
    batch = batch_of(asked, subject.sample(asked), lambda sample: 1.0)
    subject.part.close()
    calls: dict[str, Callable[[], object]] = {
        "sample": lambda: subject.sample(asked),
        "train": lambda: subject.part.train(batch),
        "publish": lambda: subject.part.publish(),
    }
    for name, call in calls.items():
        try:
            call()
        except BackendError:
            continue
        why = "code that uses a closed backend would train something that is never saved"
        fix = 'raise BackendError("the backend is closed")'
        fail(f"{name} works after close", why=why, fix=fix)
