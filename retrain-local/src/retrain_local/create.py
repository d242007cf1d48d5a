"""Creates backend `local` as configured: in this process, or on several devices in one process for each."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import torch

from retrain.api import Backend, Capabilities, Determinism, EngineTraits, Found, PluginContext
from retrain_local.attention.select_kernels import kernels_for
from retrain_local.backend import LocalBackend
from retrain_local.devices.choose import Devices, choose_devices, steps_ahead
from retrain_local.devices.group import ALONE, Group
from retrain_local.devices.torch_modes import threads_for, training_threads
from retrain_local.memory.limits import MemoryLimits
from retrain_local.model import checkpoint
from retrain_local.model.checkpoint import load_start
from retrain_local.model.load import create_pair
from retrain_local.model.model_files import find_model
from retrain_local.model.pair import LocalPolicy
from retrain_local.options import LocalOptions, ModelKeys
from retrain_local.plugin import CAPABILITIES
from retrain_local.sampling.split import create_engine, find_engine
from retrain_local.training.step_loss import PolicyLoss
from retrain_local.training.trainer import Trainer

log = logging.getLogger("retrain")
# Of an engine that declares none.
FULL_TRAITS = EngineTraits(determinism=CAPABILITIES.determinism, provides_entropy=True)
SAMPLER_DTYPES = {"bf16": torch.bfloat16}  # auto: as the trainer


def create_backend(context: PluginContext) -> Backend:
    """The policy in this process, or on several devices that all sample and train, in one process for each."""
    devices = choose_devices(context.config)
    if not devices.ranks:
        return create_local(context, devices)
    from retrain_local.ranks.backend import create_ranked  # PyTorch's process groups, which few runs need

    return create_ranked(context, devices, create_local)


def create_local(context: PluginContext, devices: Devices, group: Group = ALONE) -> LocalBackend:
    """Load the configured model once per device, attach the adapter, and build the configured engine on it."""
    config = context.config
    found = find_engine(context, devices)
    loss = PolicyLoss.of(config, context.plugins)
    source = find_model(config, context.plugins)
    pair = create_pair(
        config,
        source,
        trainer_device=devices.trainer,
        sampler_devices=devices.samplers,
        sampler_dtype=SAMPLER_DTYPES.get(config.inference.dtype),
        seed=context.seeds.derive("lora init"),
        mesh=group.mesh,
        progress=context.training_progress,
    )
    if config.table("model", ModelKeys).adapter:
        load_start(pair, config)
    trained = sum(p.numel() for p in pair.parameters.values())
    share = 100 * trained / pair.total
    log.info("trainable params: %s || all params: %s || trainable%%: %.4f", f"{trained:,d}", f"{pair.total:,d}", share)
    limits = [MemoryLimits() for _ in devices.samplers]
    # bitwise reproducible unless another thread uses PyTorch at the same time
    trained_as = pair.trained.dtype, pair.trained.shape
    kernels = kernels_for(config, devices.trainer, *trained_as, exact=not devices.is_split)
    trainer = Trainer(
        pair.trained,
        pair.parameters,
        config,
        loss=loss,
        seeds=context.seeds,
        options=context.params if isinstance(context.params, LocalOptions) else None,
        check_stop=context.check_stop,
        progress=context.training_progress,
        limits=limits[0],
        attend=kernels.packed,
        # in split mode another thread samples: the mode, which is the process's, stays off
        is_ordered=devices.is_split or (kernels.is_ordered and pair.trained.is_ordered),
        group=group,
    )
    policies = [
        LocalPolicy(
            sampler=sampler,
            device=device,
            model_path=source.path,
            stop_ids=pair.stop_ids(context.tokenizer),
            context_limit=pair.trained.shape.context,
            save_adapter=partial(checkpoint.save_adapter, pair),
            logprobs=trainer.logprobs,
            limits=own_limits,
        )
        for sampler, device, own_limits in zip(pair.samplers, devices.samplers, limits, strict=True)
    ]
    threads = threads_for(pair.total, devices.trainer)
    backend = LocalBackend(
        pair=pair,
        policies=policies,
        engine=create_engine(context, found, policies, threads),
        trainer=trainer,
        threads=threads,
        training_threads=training_threads(threads, pair.total, devices.trainer),
        capabilities=_capabilities(found, devices, is_full=pair.files is not None),
        ahead=steps_ahead(config, devices),
        group=group,
    )
    log.info("LocalTrainHelper ready (engine=%s, split_mode=%s).", found.name, devices.is_split)
    return backend


def _capabilities(found: Found, devices: Devices, *, is_full: bool) -> Capabilities:
    """What the backend can promise with this engine on these devices; a second whole model is no cheap reference."""
    traits = found.traits if isinstance(found.traits, EngineTraits) else FULL_TRAITS
    limited = traits.limit(CAPABILITIES)
    if is_full:
        limited = replace(limited, regularisers=limited.regularisers - {"kl_log"})
    if devices.is_split and devices.trainer.type == "cuda":  # the mode is process-wide
        return replace(limited, determinism=Determinism.NONE)
    return limited
