"""Losses that keep the contract, and losses that break one promise each; tensors are whatever the backend's are."""

from retrain.api import LossSpec, LossTerms

calls = 0


def reinforce(ctx):
    """A log p."""
    return ctx.advantages_M * ctx.new_M


def with_terms(ctx):
    return LossTerms(terms_M=ctx.ratios_M * ctx.advantages_M, clipped_M=ctx.ratios_M > 2.0)


def frozen(ctx):
    return ctx.ratios_M.detach() * ctx.advantages_M * ctx.new_M


FROZEN = LossSpec(name="frozen", compute=frozen, stops_gradient=True)


def averaged(ctx):
    return (ctx.ratios_M * ctx.advantages_M).mean()


def over_the_pack(ctx):
    return ctx.ratios_M * ctx.advantages_M / len(ctx.new_M)


def centred_in_the_pack(ctx):
    return ctx.ratios_M * (ctx.advantages_M - ctx.advantages_M.mean())


def upside_down(ctx):
    return -ctx.ratios_M * ctx.advantages_M


def unclamped(ctx):
    return (ctx.new_M - ctx.old_M).exp() * ctx.advantages_M


def counting(ctx):
    global calls
    calls += 1
    return ctx.ratios_M * ctx.advantages_M * calls


def _terms(ctx):
    return ctx.ratios_M * ctx.advantages_M


ODD_MEAN = LossSpec(name="odd_mean", compute=_terms, aggregation="median")
