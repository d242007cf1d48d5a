"""Backend `prime_rl`: this process orchestrates a PRIME-RL trainer and its inference server."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from retrain.api import (
    BackendError,
    Capabilities,
    Config,
    Deliver,
    DeliversEarly,
    Engine,
    EngineTraits,
    Kind,
    Measuring,
    PluginContext,
    Problem,
    ResumeError,
    Sample,
    SampleRequest,
    SamplingParams,
    TakesWeights,
    TrainBatch,
    TrainReport,
    resolve,
)
from retrain_prime_rl.options import ENGINE, PrimeRlOptions, output_folder
from retrain_prime_rl.packing import Layout, encode, pack, scalar_batch
from retrain_prime_rl.plugin import CAPABILITIES
from retrain_prime_rl.trainer_folder import (
    BROADCASTS,
    COMPLETE,
    PUT_BACK,
    ROLLOUTS,
    SENT,
    Broadcast,
    BroadcastStatus,
    RemotePolicy,
    answer_offers,
    find_sent,
    last_needless,
    put_back,
    record,
    refuse_other_trainer,
    stop_ids,
    wait_for,
)
from retrain_prime_rl.transport import SCALAR_FILE, FileTransport, Publisher, Pusher, Transport, rank_files

LOG = logging.getLogger("retrain")
STATE = "prime_rl_backend_state.json"
UNKNOWN = ("grad_norm", "ratio_mean", "ratio_max", "gap_mean", "gap_p99", "gap_max", "k3", "ess_frac", "clip_fraction")
Encode = Callable[[TrainBatch, int], Sequence[bytes]]  # the rows of a step as payloads, one per file or rank


@dataclass(slots=True, kw_only=True, eq=False)
class PrimeRlBackend:
    """Sends steps to the trainer and loads the weights that it broadcasts into the engine.

    Version N of the policy includes the trainer's first N steps. After a step is sent, the run waits for its weights,
    so that sampling stays on-policy; `sync_timeout = "stale"` lets it continue with older ones and counts those steps.
    The reported loss is a placeholder: the trainer does not send its loss back.
    """

    delivers_early: ClassVar = True

    options: PrimeRlOptions
    output_dir: Path
    transport: Transport
    encode: Encode
    engine: Engine
    policy: RemotePolicy
    capabilities: Capabilities
    sent: int  # steps of the trainer; the run's own may be skipped or repeated
    newest: Broadcast | None = None
    stale_steps: int = 0
    measured: dict[str, float] = field(default_factory=dict)
    _has_polled: bool = field(init=False)
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._has_polled = self.sent == 0

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, deliver: Deliver | None = None
    ) -> list[list[Sample]]:
        """Sample with the engine, from the published policy; BackendError on a completion of another version."""
        self._refuse_closed()
        if not self._has_polled:  # the trainer has steps from before a resume
            self.newest = self._await_weights()
            self.publish()
        if isinstance(self.engine, DeliversEarly) and self.engine.delivers_early:
            samples = self.engine.sample(requests, params, deliver)
        else:
            samples = self.engine.sample(requests, params)
        versions = {sample.policy_version for group in samples for sample in group}
        if versions - {self.policy.version}:
            what = f"completions of policy version {sorted(versions)} instead of {self.policy.version}"
            fix = "restart the inference server, then resume"
            raise BackendError(Problem(code="prime-rl.other-version", where="sampling", what=what, fix=fix))
        return samples

    def train(self, batch: TrainBatch) -> TrainReport:
        """Send the rows as the trainer's next step, then wait for its weights.

        BackendError when it cannot be sent or, unless `sync_timeout` says otherwise, when the weights do not come.
        """
        self._refuse_closed()
        step, started = self.options.counts_from + self.sent, time.perf_counter()
        self.transport.send(step, self.encode(batch, step))
        self.sent += 1
        record(self.output_dir, self.sent)
        sent, earlier = time.perf_counter(), self.measured if batch.update else {}
        self.newest = self._await_weights()
        lag = self.sent - (self.newest.step if self.newest else 0)
        self.stale_steps += lag > 0
        self.measured = {
            # packing and sending, not training
            "prime_rl_enqueue_time_s": sent - started + earlier.get("prime_rl_enqueue_time_s", 0.0),
            "prime_rl_sync_time_s": time.perf_counter() - sent + earlier.get("prime_rl_sync_time_s", 0.0),
            "prime_rl_step": step,
            "prime_rl_policy_lag": lag,
            "prime_rl_stale_steps": self.stale_steps,
        }
        unknown: dict[str, Any] = dict.fromkeys(UNKNOWN)
        return TrainReport(**unknown, loss=0.0, num_tokens=batch.num_actions, loss_is_placeholder=True)

    def publish(self) -> int:
        self._refuse_closed()
        newest, policy = self.newest, self.policy
        if newest is None or newest.step == policy.version:
            return policy.version
        if not isinstance(self.engine, TakesWeights):
            what = f"{type(self.engine).__name__} cannot load weights that a trainer wrote"
            fix = 'set engine = "vllm"'
            raise BackendError(Problem(code="prime-rl.other-engine", where="[inference] engine", what=what, fix=fix))
        policy.version, policy.weights = newest.step, newest
        load = self.engine.load_adapter if newest.is_adapter else self.engine.load_weights
        load(newest.folder, newest.step)
        return policy.version

    def metrics(self) -> Mapping[str, float]:
        measured, self.measured = self.measured, {}
        engine = self.engine
        return measured | dict(engine.metrics() if isinstance(engine, Measuring) else {})

    def save_adapter(self, folder: Path) -> None:
        self.policy.save_adapter(folder)

    def save(self, folder: Path) -> None:
        """Write the number of steps sent, and a copy of the published adapter, if any.

        The trainer saves weights and optimizer itself.
        """
        state = {
            "output_dir": str(self.output_dir),
            SENT: self.sent,
            "policy_version": self.policy.version,
            "stale_steps": self.stale_steps,
        }
        (folder / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        if self.policy.weights is not None and self.policy.weights.is_adapter:
            self.policy.save_adapter(folder)

    def load(self, folder: Path) -> None:
        """Continue from the trainer's current state: steps sent after the checkpoint remain in its weights."""
        try:
            state = json.loads((folder / STATE).read_text(encoding="utf-8"))
            saved, output_dir, self.stale_steps = state[SENT], state["output_dir"], state["stale_steps"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            where, what = str(folder / STATE), f"cannot be read: {type(error).__name__}: {error}"
            fix = "resume from an earlier checkpoint"
            raise ResumeError(Problem(code="prime-rl.unreadable-state", where=where, what=what, fix=fix)) from error
        if output_dir != str(self.output_dir):
            what = f"the run's trainer wrote to {output_dir}, and output_dir is now {self.output_dir}"
            where, fix = "[backend.options] output_dir", "restore the old value"
            raise ResumeError(Problem(code="prime-rl.output-dir-changed", where=where, what=what, fix=fix))
        if self.options.first_step < 0:
            self.sent = max(self.sent, saved)
        if self.sent > saved:
            surplus = self.sent - saved
            LOG.warning("The trainer is %d steps ahead of this checkpoint: they stay in its weights.", surplus)
        if self.sent > 0:
            self.newest = self._await_weights()

    def close(self) -> None:
        """Release sockets and connections; the trainer keeps waiting, so log for which step."""
        if self.sent and not self._is_closed:
            what = "PRIME-RL's trainer was sent %d steps and waits for step %d: stop it unless a run continues."
            LOG.info(what, self.sent, self.options.counts_from + self.sent)
        self._is_closed = True
        self.engine.close()
        self.transport.close()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            what, fix = "the prime_rl backend is closed", "create another one"
            raise BackendError(Problem(code="prime-rl.closed", what=what, fix=fix))

    def _await_weights(self) -> Broadcast | None:
        """Return the weights of all steps sent; after a permitted timeout the newest available ones or None."""
        options, self._has_polled = self.options, True
        status = wait_for(
            self.output_dir,
            self.sent,
            wait_s=options.sync_wait_s,
            poll_s=options.sync_poll_s,
            meanwhile=self.transport.serve_ranks,
        )
        newest = status.newest
        if newest is None or newest.step < self.sent:
            self._report_missing(status)
        elif newest.step > self.sent:
            # a step was sent just before this process was killed, before it could be recorded
            LOG.warning("The trainer has done %d steps, but only %d are recorded.", newest.step, self.sent)
            self.sent = newest.step
            record(self.output_dir, self.sent)
        if newest is not None:
            self.transport.forget(options.counts_from + last_needless(self.output_dir, newest.step))
        return newest

    def _report_missing(self, status: BroadcastStatus) -> None:
        """Warn or raise, with the reason why weights did not come in time, and the smallest fix."""
        options, has = self.options, status.newest.step if status.newest else 0
        next_step, is_in_files = options.counts_from + has, options.transport == "filesystem"
        batch = self.output_dir / ROLLOUTS / f"step_{next_step}"
        fix = "raise sync_wait_s if it is only slow, then resume the run"
        if status.faults:
            why, fix = "; ".join(status.faults), f"check that disk; {fix}"
        elif (self.output_dir / BROADCASTS / f"step_{self.sent}").is_dir():
            why = f"step_{self.sent} has neither {' nor '.join(COMPLETE)}: it is still being written"
        elif status.newest is None:
            why = "nothing is there, and a trainer that has this output_dir writes step_0 before it reads a batch"
            start = "start the trainer, of PRIME-RL v0.8.1.dev3 or later, with this output_dir"
            fix = f'{start} and [weight_broadcast] type = "filesystem"'
        elif (step := put_back(self.output_dir)) is not None:
            why, fix = f"the trainer was put back to step {step}, written after all others", f"{PUT_BACK}{step + 1}"
        elif is_in_files and not batch.is_dir():
            why = f"the newest complete ones have {has}, so the trainer waits for {batch}, and it is missing"
            fix = f"resume the run with first_step = {next_step}"
        else:
            at = batch if is_in_files else f"step {next_step}"
            why = f"the newest complete ones have {has}: the trainer should be at work on {at}"
            setting = f'[rollout_transport] type = "{options.transport}" in its TOML'
            fix = f"check its log, and {setting}; {fix}, with first_step = {next_step} if it has lost that step"
        what = f"no weights with {self.sent} steps in them within sync_wait_s = {options.sync_wait_s:g} s"
        if options.sync_timeout == "error":
            where = str(self.output_dir / BROADCASTS)
            raise BackendError(Problem(code="prime-rl.no-weights", where=where, what=what, why=why, fix=fix))
        LOG.warning("%s: %s. Sampling continues with version %d.", what, why, has)


def create_backend(context: PluginContext) -> PrimeRlBackend:
    options = context.params if isinstance(context.params, PrimeRlOptions) else PrimeRlOptions()
    output_dir = output_folder(context.config, options)
    output_dir.mkdir(parents=True, exist_ok=True)
    names = rank_files(options.data_world_size) if options.wire == "per_token" else (SCALAR_FILE,)
    refuse_other_trainer(output_dir, options.wire)
    first, resumes = options.counts_from, bool(context.config.resume.from_)
    sent = find_sent(output_dir, names, first=first, first_step=options.first_step, resumes=resumes)
    name = context.config.model.model
    path = context.plugins.locate_model(name) or name  # a plugin may ship the model
    policy = RemotePolicy(model_path=path, stop_ids=stop_ids(path, context.tokenizer), context_limit=options.seq_len)
    where, search_paths = context.config.place("inference.engine"), context.config.plugins.search_paths
    found = resolve(context.plugins, Kind.INFERENCE_ENGINE, ENGINE, where=where, search_paths=search_paths)
    capabilities = replace(CAPABILITIES, preserves_token_advantages=options.wire == "per_token")
    if isinstance(found.traits, EngineTraits):
        capabilities = found.traits.limit(capabilities)
    transport = _transport(options, output_dir, names, context, is_resumed=sent > 0)
    try:
        engine = found.target(context, policy)
    except BaseException:
        transport.close()
        raise
    LOG.info("PRIME-RL: step %d next, over %s, in %s", first + sent, options.transport, output_dir)
    return PrimeRlBackend(
        options=options,
        output_dir=output_dir,
        transport=transport,
        encode=_encoder(options, context.config),
        engine=engine,
        policy=policy,
        capabilities=capabilities,
        sent=sent,
    )


def _transport(
    options: PrimeRlOptions, output_dir: Path, names: Sequence[str], context: PluginContext, *, is_resumed: bool
) -> Transport:
    if options.transport == "filesystem":
        return FileTransport(output_dir, names)

    def waiting() -> None:
        """Answer the trainer's first offer: it may come before the trainer requests a batch."""
        answer_offers(output_dir)
        context.check_stop()

    if options.wire == "scalar":
        return Pusher(options, sender=output_dir.stem, check_stop=waiting)
    return Publisher(options, is_resumed=is_resumed, check_stop=waiting)


def _encoder(options: PrimeRlOptions, config: Config) -> Encode:
    if options.wire == "scalar":
        return lambda batch, step: [encode(scalar_batch(batch, step=step, seq_len=options.seq_len))]
    layout = Layout(
        seq_len=options.seq_len,
        ranks=options.data_world_size,
        pad_to_multiple_of=options.pad_to_multiple_of,
        env_name=task_name(config),
    )
    return lambda batch, step: [encode(part) for part in pack(batch, layout)]


def task_name(config: Config) -> str:
    name = config.environment.id or config.data.source
    return "all_tasks" if name == "all" else name  # PRIME-RL reserves "all"
