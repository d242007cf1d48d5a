"""What backend `local` promises, known before anything of it is imported."""

from __future__ import annotations

from retrain.api import Capabilities, CheckpointMode, Determinism

CAPABILITIES = Capabilities(
    reports_sync_loss=True,
    preserves_token_advantages=True,
    supports_checkpoint_resume=True,
    checkpoint_resume_mode=CheckpointMode.EXACT,
    determinism=Determinism.SAME_MACHINE,
    provides_entropy=True,
    regularisers=frozenset({"kl_log", "kl_reward", "kl_loss", "entropy", "kl_cov", "clip_cov"}),
    all_weights=True,
    losses=frozenset(),  # all are registered, as those of a plugin are
    loss_keys=frozenset({"dual_clip", "aggregation", "is_bounds"}),
    max_staleness=64,  # on split devices
)
