"""Our attention behind transformers' AttentionInterface: every layer calls the `Attend` of the forward pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from retrain_local.decoder import Attend, Scores

ATTENTION, KEYWORD = "retrain", "retrain_attend"


class UnsupportedAttentionError(Exception):
    """The architecture needs something that `Attend` does not provide."""


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention, with tensors [1, heads, N, size].

    The name is unknown to its table of masks, so that none is built; a mask that arrives all the same is one that the
    architecture made itself, and means something that is not known here.
    """
    attend: Attend | None = given.get(KEYWORD)
    if attend is None:
        raise UnsupportedAttentionError("it hands no keyword arguments on to its attention")
    if attention_mask is not None:
        raise UnsupportedAttentionError("it builds attention masks of its own")
    scale = given.get("scaling")
    scores = Scores(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        window=given.get("sliding_window"),
        softcap=given.get("softcap"),
        sinks_H=given.get("s_aux"),
    )
    queries_NHD, keys_NKD, values_NKD = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(module.layer_idx, queries_NHD, keys_NKD, values_NKD, scores)[None], None


def register() -> None:
    """Register the name `ATTENTION` with transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attention)
