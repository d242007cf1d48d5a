"""The plain tier: the model's own forward pass over rows of one length, with its own cache if it has one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retrain_local.attention.packed import MakeAttend, Spans
from retrain_local.attention.rows import WholeRows
from retrain_local.decoder import Attend, Scores
from retrain_local.model.hf_decoder import HfDecoder
from retrain_local.model.states import joined, mapped


class PlainDecoder(HfDecoder):
    """A causal language model that reads rows from their first token, or from its own cache of one length.

    `cache` names its cache; without one, the state of a row is its tokens so far, read again at every step. With
    `is_whole` the hidden states are the logits: the model cannot be cut below its head. With `pads` rows of different
    length share a call.
    """

    tier = "plain"

    def __init__(self, model: Any, *, cache: str, is_whole: bool, pads: bool) -> None:
        self.cache, self.pads, self._is_whole = cache, pads, is_whole
        if is_whole:
            self.device, self.dtype, self.mixers, self._model = model.device, model.dtype, None, model
            self._body, self._recompute, self._reference = model, False, []
            self._head = nn.Identity()
        else:
            super().__init__(model)

    def packed(self, attend: MakeAttend) -> MakeAttend:
        return partial(PackedRows, pads=self.pads)

    def hidden(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        assert isinstance(attend, (PackedRows, RowStep))
        return attend.hidden(self, ids_N)

    def logits(self, hidden_MD: Tensor) -> Tensor:
        return hidden_MD if self._is_whole else super().logits(hidden_MD)

    def rows(self, ids_BT: Tensor) -> Tensor:
        """Return the hidden states of whole rows, [B, T, hidden]."""
        return self._states_of(self._body(input_ids=ids_BT, use_cache=False))

    def continued(self, ids_BT: Tensor, kept: Any) -> tuple[Tensor, Any]:
        """Return the hidden states of the tokens that follow `kept` (None: of whole rows), and the next `kept`."""
        if not self.cache:
            all_BT = ids_BT.clone() if kept is None else torch.cat([kept, ids_BT], dim=1)
            return self.rows(all_BT)[:, -ids_BT.shape[1] :], all_BT
        given = {} if kept is None else {self.cache: kept}
        out = self._body(input_ids=ids_BT, use_cache=True, **given)
        return self._states_of(out), getattr(out, self.cache)

    def _states_of(self, out: Any) -> Tensor:
        return out.logits if self._is_whole else out.last_hidden_state


class _OwnAttention:
    """An `Attend` that is never called: the model computes its own attention."""

    def __call__(self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, scores: Scores) -> Tensor:
        raise NotImplementedError


class PackedRows(_OwnAttention):
    """Whole rows of a pack, each with its prefix."""

    def __init__(self, spans: Spans, device: torch.device, *, pads: bool) -> None:
        self._rows = WholeRows(spans, device, pads=pads)

    def hidden(self, decoder: PlainDecoder, ids_N: Tensor) -> Tensor:
        return self._rows.through(lambda move: decoder.rows(move(ids_N)))


class RowStep(_OwnAttention):
    """One more token of rows of one length; `kept` holds the stored state of each row."""

    def __init__(self, kept: Sequence[Any]) -> None:
        self._kept = joined(kept)

    def hidden(self, decoder: PlainDecoder, ids_N: Tensor) -> Tensor:
        hidden_B1D, self._kept = decoder.continued(ids_N[:, None], self._kept)
        return hidden_B1D[:, 0]

    def drop(self, kept_B: Tensor) -> None:
        """Keep only these rows."""
        self._kept = mapped(self._kept, lambda tensor: tensor.index_select(0, kept_B) if tensor.dim() else tensor)

    def of_row(self, place: int) -> Any:
        return mapped(self._kept, lambda tensor: tensor[place : place + 1].clone() if tensor.dim() else tensor)
