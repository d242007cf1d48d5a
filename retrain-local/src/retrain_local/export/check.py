"""Compares logits: the trained model, by transformers and PEFT or by the run's decoder, and the written one."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from retrain.api import ModelExport
from retrain_local.attention.padded import PaddedAttend
from retrain_local.attention.spans import Spans
from retrain_local.export.adapter_file import refusal
from retrain_local.export.merged import MergedWeights
from retrain_local.model.checkpoint import ADAPTER_FILE, set_adapter
from retrain_local.model.load import create_pair
from retrain_local.model.model_files import Folder
from retrain_local.model.qlora import without_advice

TEXTS = (
    "What is 17 + 25?",
    "Solve 3x + 4 = 19 for x, and show each step.",
    "def add(a, b):\n    return",
    "The capital of France is",
)
MOST_TOKENS = 48
MOST_IN_64 = 300_000_000  # parameters; larger models are compared in fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Largest differences of logits over the texts; `size` is the largest logit.

    `written` is between the trained model and the one written, `trained` between base and trained model (0 without an
    adapter): what training changed.
    """

    written: float
    trained: float
    size: float

    @property
    def relative(self) -> float:
        """`written` in units of the largest logit."""
        return self.written / max(self.size, 1.0)


def trained_logits(
    folder: Folder, adapter: Path | None, weights: MergedWeights | None, ids: Sequence[Sequence[int]]
) -> tuple[list[Tensor], float]:
    """Logits of base plus adapter in fp32, and how far they are from those of the base.

    Matrices that the run had quantised have the numbers that it computed with.
    """
    model = load(folder.source.path, folder)
    for name in weights.replaced if weights else ():
        _parameter(model, name).data.copy_(weights.base(name) if weights else 0)
    if adapter is None:
        return logits_of(model, ids), 0.0
    with without_advice():
        from peft import PeftModel

    base = logits_of(model, ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = PeftModel.from_pretrained(model, str(adapter)).eval()
    trained = logits_of(peft, ids)
    return trained, largest_difference(base, trained)


def measure(
    trained: Callable[[], tuple[list[Tensor], float]], written: Callable[[], Any], ids: Sequence[Sequence[int]]
) -> Gap:
    """Both models are loaded one after the other, never at once."""
    expected, change = trained()
    gc.collect()
    found = logits_of(written(), ids)
    size = max(float(logits.abs().max()) for logits in expected)
    return Gap(written=largest_difference(expected, found), trained=change, size=size)


def load(path: str, folder: Folder, **options: Any) -> Any:
    """A causal language model of transformers on the CPU: in fp64 if it is small, so that rounding hides nothing."""
    with without_advice():
        from transformers import AutoModelForCausalLM

        from retrain_local.model.hf_model import quiet
    with folder.refusals(torch.device("cpu")), quiet(), redirect_stderr(StringIO()):  # a bar of GGUF's reader
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            trust_remote_code=folder.trust_remote_code,
            local_files_only=folder.source.offline,
            attn_implementation="eager",
            **options,
        )
    is_small = sum(p.numel() for p in model.parameters()) <= MOST_IN_64
    is_packed = getattr(model, "is_quantized", False)  # as GGUF has them, in newer versions: they stay as they are
    return (model.double() if is_small and not is_packed else model).eval()


def logits_of(model: Any, ids: Sequence[Sequence[int]]) -> list[Tensor]:
    """[tokens, vocabulary] of each text."""
    with torch.no_grad():
        return [model(input_ids=torch.tensor([list(row)]), use_cache=False).logits[0] for row in ids]


def largest_difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """NaN where a number is not finite."""
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


def texts_ids(path: str, folder: Folder, vocabulary: int) -> list[list[int]]:
    """The texts in tokens of the tokenizer in `path`: in the folder that was written, so that it is tried too."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=folder.trust_remote_code)
    rows = tokenizer(list(TEXTS), add_special_tokens=True)["input_ids"]
    return [[token for token in row if token < vocabulary][:MOST_TOKENS] for row in rows]


def _parameter(model: Any, name: str) -> Tensor:
    names = dict(model.named_parameters())
    found: Tensor = names[name] if name in names else names[f"{model.base_model_prefix}.{name}"]
    return found


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
