"""What a backend must do: sample, learn from credit, publish, refuse non-finite numbers, and keep its promises."""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.declared import Capabilities, CheckpointMode
from retrain.kernel.errors import BackendError
from retrain.testing.backend_checkpoints import CHECKPOINTS
from retrain.testing.backend_training import TRAINING
from retrain.testing.bench import Bench
from retrain.testing.check import expect
from retrain.testing.sampling import SAMPLING
from retrain.testing.subjects import backend_subject, batch_of, open_subject, requests


def declares_its_capabilities(bench: Bench) -> None:
    """The traits of its registration equal the `capabilities` of the object and are consistent."""
    found = backend_subject(bench, bench.build()).capabilities
    expect(
        isinstance(found, Capabilities),
        f"capabilities is {type(found).__name__}",
        why="the kernel reads them before it samples",
        fix="set capabilities = Capabilities(...) on the class",
    )
    assert found is not None
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
        expect(
            False,
            f"{name} works after close",
            why="whoever uses a closed backend would train something that is never saved",
            fix='raise BackendError("the backend is closed")',
        )


BACKEND = (declares_its_capabilities, *SAMPLING, *TRAINING, *CHECKPOINTS, is_closed_for_good)
