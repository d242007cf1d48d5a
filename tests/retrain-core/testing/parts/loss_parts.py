"""Losses that keep the contract, and losses that break one promise each; tensors are whatever the backend's are."""

from __future__ import annotations

from typing import Any

from retrain.api import LossContext, LossSpec, LossTerms

calls = 0


def reinforce(ctx: LossContext) -> Any:
    """A log p."""
    return ctx.advantages_M * ctx.new_M


def with_terms(ctx: LossContext) -> LossTerms:
    return LossTerms(terms_M=ctx.ratios_M * ctx.advantages_M, clipped_M=ctx.ratios_M > 2.0)


def frozen(ctx: LossContext) -> Any:
    return ctx.ratios_M.detach() * ctx.advantages_M * ctx.new_M


FROZEN = LossSpec(name="frozen", compute=frozen, stops_gradient=True)


def averaged(ctx: LossContext) -> Any:
    return (ctx.ratios_M * ctx.advantages_M).mean()


def over_the_pack(ctx: LossContext) -> Any:
    return ctx.ratios_M * ctx.advantages_M / len(ctx.new_M)


def centred_in_the_pack(ctx: LossContext) -> Any:
    return ctx.ratios_M * (ctx.advantages_M - ctx.advantages_M.mean())


def upside_down(ctx: LossContext) -> Any:
    return -ctx.ratios_M * ctx.advantages_M


def unclamped(ctx: LossContext) -> Any:
    return (ctx.new_M - ctx.old_M).exp() * ctx.advantages_M


def counting(ctx: LossContext) -> Any:
    global calls
    calls += 1
    return ctx.ratios_M * ctx.advantages_M * calls


def _terms(ctx: LossContext) -> Any:
    return ctx.ratios_M * ctx.advantages_M


ODD_MEAN = LossSpec(name="odd_mean", compute=_terms, aggregation="median")
