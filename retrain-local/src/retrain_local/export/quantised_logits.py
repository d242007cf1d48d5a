"""Logits of a model whose matrices are quantised, as a run with `[model] quantize` computes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from retrain.api import ModelExport
from retrain_local.attention.padded import PaddedAttend
from retrain_local.attention.spans import Spans
from retrain_local.export.adapter_file import refusal
from retrain_local.model.checkpoint import ADAPTER_FILE, set_adapter
from retrain_local.model.load import create_pair
from retrain_local.model.model_files import Folder


def quantised_logits(export: ModelExport, folder: Folder, adapter: Path, ids: Sequence[Sequence[int]]) -> list[Tensor]:
    """[tokens, vocabulary] of each text, by the run's own decoder on the CPU; ConfigError when the adapter is not its.

    `export.config` is the run's.
    """
    device = torch.device("cpu")
    pair = create_pair(
        export.config, folder.source, trainer_device=device, samples=False, seed=0, role="quantised model"
    )
    if misfit := set_adapter(pair, load_file(adapter / ADAPTER_FILE)):
        raise refusal(adapter, misfit, fix="name the run that trained it")
    found = []
    with torch.no_grad():
        for row in ids:
            spans = Spans(lengths=(len(row),), prefixes=(-1,))
            positions_N = torch.from_numpy(spans.positions())
            hidden_ND = pair.trained.hidden(torch.tensor(list(row)), positions_N, PaddedAttend(spans, device))
            found.append(pair.trained.logits(hidden_ND).float())
    return found
