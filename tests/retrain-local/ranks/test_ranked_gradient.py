"""The gradient of several ranks is that of one process, whatever the loss, however the rows fall."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor

from retrain.api import (
    BackendError,
    Config,
    ConfigError,
    Determinism,
    PluginContext,
    SamplesAhead,
    SamplingParams,
    Seeds,
    TrainBatch,
    load_plugins,
)
from retrain.run.tables import read_config, registered_tables
from retrain_local.checks import parallel_problems, staleness_problems
from retrain_local.devices.group import ALONE, Group, PeerFailedError
from retrain_local.devices.torch_devices import choose_devices
from retrain_local.factory import create_backend
from retrain_local.model.checkpoint import OPTIMIZER_FILE
from retrain_local.model.load import create_pair
from retrain_local.model.model_files import KEY, find_source
from retrain_local.options import LocalOptions
from retrain_local.ranks.workers import Start, receive, send
from retrain_local.training.step_loss import PolicyLoss
from retrain_local.training.trainer import Trainer
from tests.kit.local_backend import Local
from tests.kit.sampled_rows import sampled_rows
from tests.kit.shared import first_or_long, slow_or_long

T = TypeVar("T")


class ThreadGroup:
    """A `Group` whose ranks are threads of this process."""

    shards = is_broken = False

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        self.rank, self.size, self._shared = rank, size, shared

    def gathered(self, work: Callable[[], T]) -> list[T]:
        try:
            own: Any = work()
        except BaseException as error:
            self._exchanged(error)
            raise
        found = self._exchanged(own)
        for rank, each in enumerate(found):
            if isinstance(each, BaseException):
                raise PeerFailedError(rank, str(each))
        return found

    def add(self, gradients: Sequence[Tensor]) -> None:
        mine = [each.clone() for each in gradients]
        for at, total in enumerate(zip(*self._exchanged(mine), strict=True)):
            gradients[at].copy_(torch.stack(total).sum(0))

    def _exchanged(self, own: Any) -> list[Any]:
        self._shared["found"][self.rank] = own
        self._shared["barrier"].wait(60)
        found = list(self._shared["found"])
        self._shared["barrier"].wait(60)
        return found


@pytest.fixture
def on_threads() -> Callable[..., list[Any]]:
    """What `work(group)` returns on each of so many ranks; the first error is raised."""

    def run(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
        shared = {"found": [None] * size, "barrier": threading.Barrier(size)}
        with ThreadPoolExecutor(size) as pool:
            ranks = [pool.submit(work, ThreadGroup(rank, size, shared)) for rank in range(size)]
        if errors := [error for rank in ranks if (error := rank.exception())]:
            raise min(errors, key=lambda error: isinstance(error, PeerFailedError))
        return [rank.result() for rank in ranks]

    return run


@pytest.fixture
def make_config(model_folder: Path) -> Callable[..., Config]:
    """The configuration of a run, as its file would give it."""

    def make(**tables: dict[str, Any]) -> Config:
        given: dict[str, Any] = {
            "model": {"model": str(model_folder), "lora_rank": 4} | tables.pop("model", {}),
            "backend": {"backend": "local", "devices": "cpu"} | tables.pop("backend", {}),
            "training": {"lr": 1e-2} | tables.pop("training", {}),
            "optimizer": {"grad_clip_norm": 0.0} | tables.pop("optimizer", {}),
            **tables,
        }
        plugins = load_plugins()
        config, problems = read_config(given, plugins, registered_tables(plugins))
        assert not problems
        return config

    return make


@pytest.fixture
def make_ranked(make_config: Callable[..., Config]) -> Iterator[Callable[..., Any]]:
    """A backend, of `ranks` processes if there are several."""
    made: list[Any] = []

    def make(ranks: int = 1, parallel: str = "replicate", check_stop: Callable[[], None] = int, **tables: Any) -> Any:
        options = {"parallel": parallel} | tables.pop("options", {})
        tables["backend"] = {"devices": ",".join(["cpu"] * ranks), "options": options}
        config, params = make_config(**tables), LocalOptions(**options)
        given = {"plugins": load_plugins(), "params": params, "check_stop": check_stop}
        made.append(create_backend(PluginContext(config=config, seeds=Seeds(1), **given)))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


MakeConfig = Callable[..., Config]
OnThreads = Callable[..., list[Any]]
LOSSES: dict[str, dict[str, Any]] = {
    "importance sampling": {},
    "sequence mean": {"algorithm": {"loss": "gspo"}},
    "constant": {"algorithm": {"loss": "ppo", "aggregation": "constant"}},
    "mismatch": {"algorithm": {"loss": "ppo", "tis_cap": 2.0}},
    "tokens left out": {"algorithm": {"loss": "m2po", "loss_params": {"tau": 1e-3}}},
    "entropy": {"entropy": {"coef": 0.1}},
    "kl": {"kl": {"coef": 0.3, "where": "loss"}},
    "kl_cov": {"entropy": {"kl_cov": 0.1}},
    "clip_cov": {"entropy": {"clip_cov": 0.2, "clip_cov_low": -100.0, "clip_cov_high": 100.0}},
    "all weights": {"model": {"lora_rank": 0}},
}


def trainer_of(config: Config, group: Group = ALONE) -> Trainer:
    plugins = load_plugins()
    source, device = find_source(config.model.model, KEY, plugins), choose_devices(config).trainer
    pair = create_pair(config, source, trainer_device=device, samples=False, seed=1)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for name, p in pair.parameters.items():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.05)
    return Trainer(pair.trained, pair.parameters, config, loss=PolicyLoss.of(config, plugins), group=group)


def gradient_of(trainer: Trainer, batch: TrainBatch) -> tuple[tuple[Any, ...], Tensor]:
    """Loss, clipped tokens and number of gaps; all gradients in one vector."""
    loss, clipped, gaps_N = trainer.accumulate(batch)
    vector = torch.cat([p.grad.flatten() for p in trainer.parameters.values() if p.grad is not None])
    return (loss, clipped, len(gaps_N)), vector


@pytest.fixture
def batch(local: Local) -> TrainBatch:
    """Rows with a reference that is not the policy."""
    found = local.roll(local.make())
    rng = np.random.default_rng(5)
    rows = [
        replace(row, reference_logprobs_T=row.logprobs_T + rng.normal(0, 0.1, len(row.tokens_T)), kl_coef=0.3)
        for row in found.rows
    ]
    return replace(found, rows=tuple(rows), num_masked=2)


def check_same(one: tuple[Any, Tensor], other: tuple[Any, Tensor], *, within: float = 1e-6) -> None:
    (loss, *counts), gradient = one
    (other_loss, *other_counts), other_gradient = other
    assert other_loss == pytest.approx(loss, rel=1e-6, abs=1e-7)
    assert other_counts == counts
    assert float((other_gradient - gradient).norm() / gradient.norm()) < within


@pytest.mark.parametrize("name", slow_or_long(LOSSES, "sequence mean"))
def test_every_loss_on_two_ranks(name: str, batch: TrainBatch, make_config: MakeConfig, on_threads: OnThreads) -> None:
    config = make_config(**LOSSES[name])
    batch = replace(batch, update=int("cov" in name), updates=2)
    alone = gradient_of(trainer_of(config), batch)
    for found in on_threads(2, lambda group: gradient_of(trainer_of(config, group), batch)):
        check_same(alone, found)


@pytest.mark.parametrize("rows", slow_or_long([1, 2, 5], 2))
def test_ranks_with_uneven_rows(rows: int, batch: TrainBatch, make_config: MakeConfig, on_threads: OnThreads) -> None:
    config, few = make_config(), replace(batch, rows=batch.rows[:rows])
    alone = gradient_of(trainer_of(config), few)
    for found in on_threads(3, lambda group: gradient_of(trainer_of(config, group), few)):
        check_same(alone, found, within=5e-6)  # few rows: their gradients nearly cancel


def test_log_probabilities_are_in_row_order(batch: TrainBatch, make_config: MakeConfig, on_threads: OnThreads) -> None:
    alone = trainer_of(make_config()).logprobs(batch.rows, 1.0)
    for found in on_threads(2, lambda group: trainer_of(make_config(), group).logprobs(batch.rows, 1.0)):
        for one, other in zip(alone, found, strict=True):
            np.testing.assert_allclose(other, one, atol=2e-5)


def test_ranks_make_the_very_same_update(batch: TrainBatch, make_config: MakeConfig, on_threads: OnThreads) -> None:
    def trained(group: Group) -> list[Tensor]:
        trainer = trainer_of(make_config(optimizer={"grad_clip_norm": 0.01}), group)
        trainer.step(batch)
        return [p.detach().clone() for p in trainer.parameters.values()]

    first, second = on_threads(2, trained)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_an_error_of_one_rank_changes_none(batch: TrainBatch, make_config: MakeConfig, on_threads: OnThreads) -> None:
    before = [p.detach().clone() for p in trainer_of(make_config()).parameters.values()]
    trainers: list[Trainer] = []

    def fail(group: Group) -> None:
        trainer = trainer_of(make_config(), group)
        trainers.append(trainer)
        if group.rank:
            trainer._gradients = lambda *_: 1 / 0
        trainer.step(batch)

    with pytest.raises(ZeroDivisionError):
        on_threads(2, fail)
    for trainer in trainers:
        assert all(torch.equal(p, old) for p, old in zip(trainer.parameters.values(), before, strict=True))
        assert all(p.grad is None for p in trainer.parameters.values())


PARAMS = SamplingParams(max_tokens=16, temperature=1.0)
MakeRanked = Callable[..., Any]
MODES: dict[str, dict[str, Any]] = {"replicate": {}, "fsdp": {"model": {"lora_rank": 0}}}


def saved(backend: Any, folder: Path) -> dict[str, dict[str, np.ndarray]]:
    folder.mkdir()
    backend.save(folder)
    return {file.name: load_file(file) for file in folder.glob("*.safetensors")}


def check_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], within: float) -> None:
    """All tensors together differ by less than that, relative to their norm."""
    assert found.keys() == wanted.keys()
    flat, other = (np.concatenate([each[name].ravel() for name in sorted(wanted)]) for each in (wanted, found))
    assert np.linalg.norm(other - flat) / np.linalg.norm(flat) < within


@pytest.mark.slow
@pytest.mark.parametrize("parallel", first_or_long(MODES))
def test_two_processes_are_one(parallel: str, make_ranked: MakeRanked, local: Local, tmp_path: Path) -> None:
    alone, both = make_ranked(1, **MODES[parallel]), make_ranked(2, parallel, **MODES[parallel])
    assert not isinstance(both, SamplesAhead)
    assert both.capabilities.determinism is Determinism.SAME_MACHINE
    delivered = set[tuple[int, int]]()
    for step in range(2):
        ours = alone.sample(local.requests, PARAMS)
        theirs = both.sample(local.requests, PARAMS, lambda group, place, _: delivered.add((group, place)))
        for one, other in zip(ours, theirs, strict=True):
            assert [s.tokens_T.tolist() for s in one] == [s.tokens_T.tolist() for s in other]
            assert {s.policy_version for s in other} == {step}
            for s, t in zip(one, other, strict=True):
                np.testing.assert_allclose(s.logprobs_T, t.logprobs_T, atol=1e-3 if step else 1e-4)
        assert len(delivered) == sum(len(group) for group in ours)
        rows = sampled_rows(local.requests, ours, np.random.default_rng(step))
        batch = TrainBatch(step=step, rows=rows, temperature=1.0)
        mine, report = alone.train(batch), both.train(batch)
        assert report.grad_norm == pytest.approx(mine.grad_norm, rel=1e-6 if step == 0 else 1e-3)
        assert (report.num_tokens, report.clip_fraction) == (mine.num_tokens, mine.clip_fraction)
        if step == 0:  # the first moment is a tenth of the gradient
            files, own = saved(both, tmp_path / "both"), saved(alone, tmp_path / "alone")
            assert sorted(p.name for p in (tmp_path / "both").iterdir()) == sorted(
                p.name for p in (tmp_path / "alone").iterdir()
            )
            moments, mine = (
                {k: v for k, v in f[OPTIMIZER_FILE].items() if k.endswith("exp_avg")} for f in (files, own)
            )
            check_close(moments, mine, 1e-6)
        assert alone.publish() == both.publish() == step + 1
        for one, other in zip(alone.logprobs(rows, 1.0), both.logprobs(rows, 1.0), strict=True):
            np.testing.assert_allclose(other, one, atol=5e-3)  # Adam makes steps of lr of the smallest gradients
    assert both.metrics()["engine_live_rows_mean"] > 0


@pytest.mark.long
@pytest.mark.parametrize("parallel", MODES)
def test_a_checkpoint_continues_on_another_number_of_ranks(
    parallel: str, make_ranked: MakeRanked, local: Local, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    two = make_ranked(2, parallel, **MODES[parallel])
    rows = sampled_rows(local.requests, two.sample(local.requests, PARAMS), np.random.default_rng(0))
    few = TrainBatch(step=0, rows=rows[:1], temperature=1.0)  # one of two ranks has no row
    two.train(few)
    before = saved(two, tmp_path / "two")
    one = make_ranked(1, **MODES[parallel])
    one.load(tmp_path / "two")
    assert "This checkpoint is of 2 ranks, and the run continues on 1" in caplog.text
    assert saved(one, tmp_path / "one").keys() == before.keys()
    for name, tensors in before.items():
        again = load_file(tmp_path / "one" / name)
        assert all(np.array_equal(again[key], tensor) for key, tensor in tensors.items())
    two.load(tmp_path / "one")
    assert two.publish() == 1
    batch = replace(few, step=1, rows=rows)
    assert two.train(batch).grad_norm == pytest.approx(one.train(batch).grad_norm, rel=1e-5)


@pytest.mark.long
def test_a_model_that_another_rank_cannot_load_ends_the_start(make_ranked: MakeRanked) -> None:
    with pytest.raises((ConfigError, BackendError)):
        make_ranked(2, inference={"attention_kernel": "flash"})


def of_ranks(make_config: MakeConfig, parallel: str, **tables: Any) -> Config:
    return make_config(backend={"devices": "cpu,cpu", "options": {"parallel": parallel}}, **tables)


def test_ranks_are_no_split_devices_and_one_device_is_no_rank(make_config: MakeConfig) -> None:
    devices = choose_devices(of_ranks(make_config, "replicate"))
    assert (len(devices.ranks), devices.is_split) == (2, False)
    assert devices.of_rank(1).trainer == devices.ranks[1]
    assert choose_devices(of_ranks(make_config, "split")).is_split
    assert not choose_devices(make_config(backend={"devices": "cpu", "options": {"parallel": "fsdp"}})).ranks


def test_fsdp_of_an_adapter_and_sampling_ahead_on_ranks_are_refused(make_config: MakeConfig) -> None:
    (problem,) = parallel_problems(of_ranks(make_config, "fsdp"))
    assert "'fsdp' does not go with an adapter" in problem.what
    assert not parallel_problems(of_ranks(make_config, "fsdp", model={"lora_rank": 0}))
    assert not parallel_problems(of_ranks(make_config, "replicate"))
    (problem,) = staleness_problems(of_ranks(make_config, "replicate", training={"max_staleness": 1}))
    assert problem.fix.startswith('set parallel to "split"')
    assert not staleness_problems(of_ranks(make_config, "split", training={"max_staleness": 1}))


@pytest.mark.parametrize(
    ("before", "now", "is_same"),
    [
        (("split", "cpu"), ("replicate", "cpu,cpu"), True),
        (("replicate", "cpu,cpu"), ("fsdp", "cpu,cpu,cpu"), True),
        (("replicate", "gpu:0,gpu:1"), ("split", "gpu:0"), True),
        (("replicate", "cpu,cpu"), ("replicate", "gpu:0,gpu:1"), False),
        (("split", "cpu,cpu"), ("replicate", "cpu,cpu"), False),
        (("split", "cpu"), ("split", "cpu,cpu"), False),
    ],
)
def test_a_resumed_run_may_have_other_ranks(before: tuple[str, str], now: tuple[str, str], *, is_same: bool) -> None:
    then, there = (LocalOptions(parallel=parallel).kept_on_resume(devices) for parallel, devices in (before, now))
    assert (then == there) is is_same
    changed = LocalOptions(parallel=before[0], micro_batch_tokens=99).kept_on_resume(before[1])
    assert changed != then, "other options must stay"


def test_a_configuration_arrives_whole_with_the_tables_of_plugins(make_config: Callable[..., Config]) -> None:
    config = make_config(model={"lora_rank": 8, "dtype": "fp32"}, entropy={"coef": 0.5})
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(config)  # what the messages know more than pickle
    start = Start(rank=1, port=3, threads=1, config=config, seeds=Seeds(7), params=LocalOptions(), stop_id=None)
    ours, theirs = Pipe()
    send(ours, start)
    found = receive(theirs)
    assert found.config.as_dict() == config.as_dict()
    assert found.config.model.lora_rank == 8
    assert found.config.value("entropy.coef", 0.0) == 0.5
    assert found.config.value("model.dtype", "") == "fp32"
    assert found.config.place("model.dtype") == config.place("model.dtype")
    assert (found.seeds, found.params) == (start.seeds, start.params)


def test_a_closed_end_is_noticed_and_an_error_of_a_peer_survives_the_way() -> None:
    ours, theirs = Pipe()
    theirs.close()
    with pytest.raises((EOFError, ConnectionError)):
        receive(ours)
    with pytest.raises(BrokenPipeError):
        send(ours, "x")
    error = pickle.loads(pickle.dumps(PeerFailedError(3, "ValueError: x")))
    assert (error.rank, str(error)) == (3, str(PeerFailedError(3, "ValueError: x")))
