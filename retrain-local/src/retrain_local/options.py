"""Keys of the local backend: `[backend.options]`, its additions to `[model]` and `[lora]`, parameters of losses."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from retrain.api import Table, key


class ModelKeys(Table):
    """The keys of backend `local` in the kernel's `[model]`."""

    dtype: Literal["auto", "fp32", "bf16"] = key(
        "auto",
        "Weights and activations of backend local, in sampling and training; auto = fp32 on a CPU, bf16 on a GPU.",
    )
    quantize: Literal["none", "nf4", "int8"] = key(
        "none",
        "Frozen matrices of backend local, in sampling and training: none = as dtype says, nf4 = 4 bits (QLoRA), int8.",
    )
    replay_experts: Literal["auto", "on", "off"] = key(
        "auto", "Train a mixture with the experts that sampling chose: auto = if a server reports them (backend local)."
    )
    adapter: str = key(
        "",
        "PEFT adapter to start from (backend local): its folder, or a run, whose newest checkpoint is taken.",
        reads="adapter",
    )


class LoraKeys(Table):
    """The keys of backend `local` in the kernel's `[lora]`."""

    rslora: bool = key(False, "Scale the adapter by alpha / sqrt(rank), not alpha / rank (backend local).")
    targets: list[str] = key(
        ["all-linear"],
        "Layers with an adapter (backend local): all-linear = every linear layer but the head, routers and experts' "
        "fused matrices; attention = those in attention or a layer that replaces it; experts; or names of modules.",
    )
    dora: bool = key(
        False, "Train magnitudes of the matrices in addition; samples slowly, by PEFT's modules (backend local)."
    )


class SapoParams(Table):
    tau_pos: float = key(1.0, "Steepness of the gate for positive advantages.", gt=0.0)
    tau_neg: float = key(1.05, "The same for negative ones: a steeper gate forgets them sooner.", gt=0.0)


class VespoParams(Table):
    k_pos: float = key(2.0, "Power of the weight for positive advantages.", ge=0.0)
    lambda_pos: float = key(3.0, "Decay of the weight for positive advantages.", gt=0.0)
    k_neg: float = key(3.0, "Power of the weight for negative advantages.", ge=0.0)
    lambda_neg: float = key(2.0, "Decay of the weight for negative advantages.", gt=0.0)


class DppoTvParams(Table):
    divergence: float = key(0.15, "Largest change of a token's probability the way of its advantage.", gt=0.0)
    ratio_cap: float = key(20.0, "Largest ratio.", gt=0.0)


class DppoKlParams(Table):
    divergence: float = key(0.05, "Largest divergence of (p, 1 - p), in nats.", gt=0.0)
    ratio_cap: float = key(20.0, "Largest ratio.", gt=0.0)


class M2poParams(Table):
    tau: float = key(0.04, "Bound of the mean squared log-ratio of the tokens that are kept.", gt=0.0)


class DroParams(Table):
    beta: float = key(0.1, "Weight of the squared log-ratio.", ge=0.0)


class LocalOptions(BaseModel):
    """Options of the local backend. No row is ever truncated, and no option changes the gradient beyond rounding."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    parallel: Literal["split", "replicate", "fsdp"] = Field(
        default="split",
        description="Use of several devices: split = the last trains while the others sample; replicate, fsdp = each "
        "samples and trains its share in its own process, and fsdp shards the trained weights (lora_rank = 0).",
    )
    micro_batch_tokens: int = Field(
        default=0,
        ge=0,
        description="Tokens of one forward and backward pass, a prompt shared by a group counted once; 0 = up to "
        "1536 on a CPU and 65536 on a GPU, as many as are fast and fit into free memory.",
    )
    gradient_checkpointing: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Store one activation per layer and recompute the others in the backward pass; auto = where too "
        "little memory is free to keep them, or after running out of it.",
    )
    cache_gb: float = Field(
        default=0.0,
        ge=0.0,
        description="GiB for keys and values while sampling; completions that do not fit wait. 0 = 4 on a CPU, half of "
        "it a working copy, and 80 % of the free memory on a GPU. A GPU takes no more than a step needs.",
    )

    def kept_on_resume(self, devices: str) -> dict[str, Any]:
        """Return the parts of `[backend] devices` and of these options that a resumed run must keep, as plain data."""
        # ranks compute the numbers of one process, apart from rounding, so their number and `parallel` may change
        names = [name.strip() for name in devices.split(",")]
        if self.parallel == "split" and len(names) > 1:
            return {"devices": names, **self.model_dump()}
        kinds = sorted({name.partition(":")[0] for name in names})
        return {"devices": kinds, **self.model_dump(exclude={"parallel"})}
