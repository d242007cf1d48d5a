"""Builds the backend: checks, the trainer's next step, the transport, and the engine that samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from retrain.api import Config, EngineTraits, Kind, PluginContext, resolve
from retrain_prime_rl import checks, steps
from retrain_prime_rl.backend import Encode, PrimeRlBackend
from retrain_prime_rl.broadcasts import answer_offers
from retrain_prime_rl.options import PrimeRlOptions
from retrain_prime_rl.packing import Layout, pack, scalar_batch
from retrain_prime_rl.plugin import CAPABILITIES
from retrain_prime_rl.policy import RemotePolicy, stop_ids
from retrain_prime_rl.transport import SCALAR_FILE, FileTransport, Transport, rank_files
from retrain_prime_rl.wire import encode
from retrain_prime_rl.zmq_transport import Publisher, Pusher

LOG = logging.getLogger("retrain")


def create_backend(context: PluginContext) -> PrimeRlBackend:
    """Connect to a trainer and an inference server that the user started; ConfigError on an unusable configuration."""
    options = context.params if isinstance(context.params, PrimeRlOptions) else PrimeRlOptions()
    output_dir = checks.output_dir(context.config, options)
    output_dir.mkdir(parents=True, exist_ok=True)
    names = rank_files(options.data_world_size) if options.wire == "per_token" else (SCALAR_FILE,)
    steps.refuse_other_trainer(output_dir, options.wire)
    first, resumes = options.counts_from, bool(context.config.resume.from_)
    sent = steps.find_sent(output_dir, names, first=first, first_step=options.first_step, resumes=resumes)
    name = context.config.model.model
    path = context.plugins.locate_model(name) or name  # the folder of a model shipped by a plugin, else as configured
    policy = RemotePolicy(model_path=path, stop_ids=stop_ids(path, context.tokenizer), context_limit=options.seq_len)
    where, search_paths = context.config.place("inference.engine"), context.config.plugins.search_paths
    found = resolve(context.plugins, Kind.INFERENCE_ENGINE, checks.ENGINE, where=where, search_paths=search_paths)
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
        """A trainer may wait for an answer to its first weights before it asks for a batch."""
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
    """Name under which the trainer groups statistics: the environment or data source; "all" is reserved."""
    name = config.environment.id or config.data.source
    return "all_tasks" if name == "all" else name
