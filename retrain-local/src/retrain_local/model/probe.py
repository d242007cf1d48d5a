"""The function behind transformers' AttentionInterface, and a small forward pass that verifies it for a model.

Every layer calls the `Attend` of the forward pass; logits over packed rows are compared with the model's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from retrain_local.attention.packed import PaddedAttend, Spans
from retrain_local.decoder import Attend, Decoder, Scores, Shape

ATTENTION, KEYWORD = "retrain", "retrain_attend"


class UnsupportedAttentionError(Exception):
    """The architecture needs something that `Attend` does not provide."""


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """Replace attention in transformers, with tensors [1, heads, N, size]."""
    # transformers builds no mask for this unknown name, so a mask was made by the architecture, with unknown meaning
    attend: Attend | None = given.get(KEYWORD)
    if attend is None:
        raise UnsupportedAttentionError("it passes no keyword arguments to its attention")
    if attention_mask is not None:
        raise UnsupportedAttentionError("it builds its own attention masks")
    scale = given.get("scaling")
    scores = Scores(
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        window=given.get("sliding_window"),
        softcap=given.get("softcap"),
        sinks_H=given.get("s_aux"),
    )
    queries_NHD, keys_NKD, values_NKD = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(module.layer_idx, queries_NHD, keys_NKD, values_NKD, scores)[None], None


# Two rows of 9 and 7 tokens that share their first four.
SPANS = Spans(lengths=(4, 5, 3), prefixes=(-1, 0, 0))
TOLERANCE = {torch.float32: 1e-3}  # of the norm of the logits
LOOSE = 0.1  # in bf16, where routing may pick other experts


@dataclass(slots=True, eq=False)
class Recorder:
    """An `Attend` that records the layers that called it, and their shapes."""

    attend: PaddedAttend
    layers: list[int] = field(default_factory=list)
    shapes: set[tuple[int, int, int, int]] = field(default_factory=set)
    windows: set[int | None] = field(default_factory=set)

    def __call__(self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, scores: Scores) -> Tensor:
        _, heads, size = queries_NHD.shape
        self.layers.append(layer)
        self.shapes.add((heads, keys_NKD.shape[1], size, values_NKD.shape[2]))
        self.windows.add(scores.window)
        return self.attend(layer, queries_NHD, keys_NKD, values_NKD, scores)


def own_logits(model: Any, vocabulary: int) -> list[Tensor]:
    shared, *endings = _ids(vocabulary, model.device).split(SPANS.lengths)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        rows = [torch.cat([shared, ending])[None] for ending in endings]
        logits = [model(input_ids=row, use_cache=False).logits[0] for row in rows]
    model.set_attn_implementation(ATTENTION)
    return logits


def measured(decoder: Decoder, own: list[Tensor], parameters: int, context: int | None, inner: int) -> Shape:
    """Return the decoder's sizes; UnsupportedAttentionError unless its logits over packed rows equal `own`."""
    device, vocabulary = decoder.device, own[0].shape[-1]
    recorder = Recorder(PaddedAttend(SPANS, device))
    positions_N = torch.from_numpy(SPANS.positions()).to(device)
    with torch.no_grad():
        try:
            hidden_ND = decoder.hidden(_ids(vocabulary, device), positions_N, recorder)
        except (TypeError, ValueError) as error:
            if KEYWORD in str(error):
                raise UnsupportedAttentionError("it takes no keyword arguments for its attention") from error
            raise
        shared, *endings = decoder.logits(hidden_ND).split(SPANS.lengths)
    if recorder.layers != list(range(len(recorder.layers))) or not recorder.layers:
        raise UnsupportedAttentionError(f"its attention is called for layers {recorder.layers}")
    if len(recorder.shapes) > 1:
        raise UnsupportedAttentionError("its layers have heads of different numbers or sizes")
    for ending, expected in zip(endings, own, strict=True):
        gap = (torch.cat([shared, ending]) - expected).float().norm() / expected.float().norm()
        if not gap <= TOLERANCE.get(decoder.dtype, LOOSE):
            raise UnsupportedAttentionError(
                f"without padding its logits differ by {float(gap):.2g} of their size from its own"
            )
    ((heads, kv_heads, head_size, value_size),) = recorder.shapes
    return Shape(
        layers=len(recorder.layers),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        value_size=value_size,
        hidden=hidden_ND.shape[1],
        inner=inner,
        vocabulary=vocabulary,
        context=context,
        parameters=parameters,
    )


def _ids(vocabulary: int, device: torch.device) -> Tensor:
    return (torch.arange(SPANS.num_tokens, device=device) * 7919 + 17) % vocabulary
