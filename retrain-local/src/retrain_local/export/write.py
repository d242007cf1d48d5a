"""Writes a whole model: merge, write, compare logits with the trained model, and refuse a model that differs."""

from __future__ import annotations

import gc
import logging
import math
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from retrain.api import BackendError, ConfigError, ExportedModel, ModelExport, Problem
from retrain_local.attention.packed import PaddedAttend, Spans
from retrain_local.export import gguf_file
from retrain_local.export.merged import (
    CPU,
    AdapterFile,
    MergedWeights,
    can_stream,
    in_order,
    open_merged,
    read_adapter_file,
    refusal,
)
from retrain_local.memory.shape import read_shape
from retrain_local.memory.sizes import AUTO_DTYPE, runs
from retrain_local.model.checkpoint import ADAPTER_FILE, set_adapter
from retrain_local.model.load import DTYPES, create_pair
from retrain_local.model.model_files import CONFIG_FILE, Folder, find_source, open_folder, write_json
from retrain_local.model.qlora import silence_advice
from retrain_local.model.weights import INDEX, SINGLE
from retrain_local.options import ModelKeys

log = logging.getLogger("retrain")
SPARE_BYTES = 64 * 2**20
# Relative to the largest logit. Weights are rounded once, to the dtype of the files; a larger gap is a fault.
BOUNDS = {"fp32": 1e-5, "f32": 1e-5, "f16": 0.02, "bf16": 0.1, "q8_0": 0.2}


def export_model(export: ModelExport) -> ExportedModel:
    """Write the model; ConfigError when its parts do not fit together, BackendError when the result differs from it."""
    source = find_source(export.base, export.config.place("model.model"), export.plugins)
    folder = open_folder(export.config, source, export.base)
    adapter = None if export.adapter is None else read_adapter_file(export.adapter)
    quantize = "none" if export.adapter is None else export.config.table("model", ModelKeys).quantize
    dtype: str = export.config.table("model", ModelKeys).dtype
    if dtype == "auto":
        dtype = AUTO_DTYPE["cuda" if "gpu" in export.config.backend.devices else "cpu"]
    is_gguf = export.form == "gguf"
    with ExitStack() as stack:
        weights = None
        with folder.refusals(CPU):
            if can_stream(folder, adapter):
                options = {"quantize": quantize, "dtype": DTYPES[dtype], "progress": export.progress}
                weights = stack.enter_context(open_merged(folder, adapter, **options))
        kind = _chosen_dtype(export, folder, adapter, weights)
        width = gguf_file.WIDTHS[kind] if is_gguf else DTYPES[kind]
        if weights is None:
            tensors, notes = _write_by_peft(export, folder, adapter, width)
        else:
            _check_space(export.out, sum(weights.num_bytes(name, width) for name in weights.names()))
            tensors, notes = len(weights.names()), tuple[str, ...]()
            with _writing(export.out):
                if is_gguf:
                    notes = gguf_file.write_gguf(weights, folder, export.out, kind)
                else:
                    write_model(weights, folder, export.out, width)
        export.progress.begin("", 0)
        gap = quantised = None
        if export.with_check:
            gap, quantised = _compared(export, folder, adapter, weights, kind)
    return ExportedModel(
        dtype=kind,
        tensors=tensors,
        num_bytes=sum(file.stat().st_size for file in export.out.iterdir()),
        gap=gap.written if gap else None,
        change=gap.trained if gap and adapter else None,
        size=gap.size if gap else None,
        quantised_gap=quantised,
        is_unchanged=adapter is not None and adapter.is_zero,
        notes=notes,
    )


def _chosen_dtype(
    export: ModelExport, folder: Folder, adapter: AdapterFile | None, weights: MergedWeights | None
) -> str:
    """Return the dtype to write; warn if the default, the base's, is narrower than the trained numbers."""
    wide = "f32" if export.form == "gguf" else "fp32"
    if weights is None:
        is_narrow = str(folder.document.get("dtype") or folder.document.get("torch_dtype")) == "bfloat16"
    else:
        is_narrow = weights.dtype() == torch.bfloat16
    is_fp32 = adapter.is_fp32 if adapter else bool(weights and weights.replaced)
    if is_narrow and is_fp32 and not export.dtype:
        trained = "adapter" if export.adapter else "trained weights"
        text = "bf16 is written, as the base has it: it rounds the fp32 numbers of the %s. `--dtype %s` keeps them"
        log.warning(text, trained, wide)
    return export.dtype or ("bf16" if is_narrow else wide)


def _compared(
    export: ModelExport, folder: Folder, adapter: AdapterFile | None, weights: MergedWeights | None, kind: str
) -> tuple[Gap, float | None]:
    tokenizer = folder.source.path if export.form == "gguf" else str(export.out)
    ids = texts_ids(tokenizer, folder, read_shape(folder.weights(), where=folder.where).vocabulary)

    options = gguf_file.read_options(folder) if export.form == "gguf" else {}
    # both models are loaded one after the other, never at once
    expected, change = trained_logits(folder, adapter.folder if adapter else None, weights, ids)
    gc.collect()
    found = logits_of(load(str(export.out), folder, **options), ids)
    size = max(float(logits.abs().max()) for logits in expected)
    gap = Gap(written=largest_difference(expected, found), trained=change, size=size)
    refuse_gap(gap, kind, export)
    if adapter is None or weights is None or not weights.replaced:
        return gap, None
    return gap, largest_difference(quantised_logits(export, folder, adapter.folder, ids), found)


def refuse_gap(gap: Gap, kind: str, export: ModelExport) -> None:
    """Raise BackendError when the written model is not the trained one, rounded to its dtype."""
    if gap.relative <= BOUNDS[kind]:  # False for NaN
        return
    if not math.isfinite(gap.written):
        what, fix = "the logits of the trained or written model are not finite", "use an earlier checkpoint"
        raise BackendError(Problem(code="export.non-finite-logits", where=export.base, what=what, fix=fix))
    what = f"the logits of the written model differ by {gap.written:.3g} from the trained model's"
    why = f"in {kind} at most {BOUNDS[kind] * max(gap.size, 1.0):.3g} is rounding"
    fix = "nothing was kept; an adapter of an embedding that the head shares cannot be merged, anything else is a fault"
    raise BackendError(Problem(code="export.other-logits", where=export.base, what=what, why=why, fix=fix))


def _write_by_peft(
    export: ModelExport, folder: Folder, adapter: AdapterFile | None, dtype: torch.dtype
) -> tuple[int, tuple[str, ...]]:
    """Let PEFT merge in memory, for more than factors of matrices in the base's files; return tensors and notes."""
    if export.form == "gguf" or adapter is None:
        what = f"the adapter in {export.adapter} changes more than matrices of {export.base}"
        fix = "merge it into a folder first: --format transformers"
        raise ConfigError(Problem(code="export.gguf-adapter", where=export.base, what=what, fix=fix))
    model = load(folder.source.path, folder)
    from peft import PeftModel

    _check_space(export.out, sum(p.numel() for p in model.parameters()) * dtype.itemsize)
    merged = PeftModel.from_pretrained(model, str(adapter.folder)).merge_and_unload(safe_merge=True)
    with _writing(export.out):
        merged.to(dtype).save_pretrained(export.out)
        copy_companions(folder, export.out)
    return len(merged.state_dict()), ("merged in memory by PEFT: the adapter changes more than single matrices",)


def _check_space(out: Path, num_bytes: int) -> None:
    wanted, free = num_bytes + SPARE_BYTES, shutil.disk_usage(out).free
    if free < wanted:
        what = f"{wanted / 2**20:,.0f} MiB are needed, and {free / 2**20:,.0f} MiB are free"
        fix = "free some space, or name another folder"
        raise ConfigError(Problem(code="export.disk-full", where=str(out.parent), what=what, fix=fix))


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        what, fix = f"cannot be written: {error}", "free some space, or name another folder; nothing was kept"
        raise BackendError(Problem(code="export.not-written", where=str(out.parent), what=what, fix=fix)) from error


SHARD_BYTES = 4 * 2**30
STORED_AS = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
# Files of a model's folder that are not copied: other weights, and a checkpoint's state.
NOT_COPIED = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx"),
    *("adapter_config.json", "backend_state.json", "checkpoint.json", "checksums.json", "sampler_limits.json"),
    *("config.json", "README.md", ".*"),
)
MOST_COPIED_BYTES = 200 * 2**20  # of one file; a tokenizer has up to 40 MB


def write_model(weights: MergedWeights, folder: Folder, out: Path, dtype: torch.dtype) -> None:
    """Write config, companions and every tensor into an existing empty folder, at most one shard in memory."""
    document = {key: value for key, value in folder.document.items() if key != "torch_dtype"}
    write_json(out / CONFIG_FILE, document | {"dtype": STORED_AS[dtype]})
    copy_companions(folder, out)
    shards = list(runs(in_order(weights.names()), SHARD_BYTES, lambda name: weights.num_bytes(name, dtype)))
    index: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        merged = ((name, weights.tensor(name)) for name in names)
        tensors = {name: (x.to(dtype) if x.is_floating_point() else x).contiguous() for name, x in merged}
        save_file(tensors, out / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(weights.num_bytes(name, dtype) for name in index)
        write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def copy_companions(folder: Folder, out: Path) -> None:
    source = Path(folder.source.path)
    if not source.is_dir():
        files = [*folder.companions()]
    else:
        files = [path for path in sorted(source.iterdir()) if not any(path.match(each) for each in NOT_COPIED)]
    for file in files:
        if file.is_file() and file.stat().st_size <= MOST_COPIED_BYTES:
            shutil.copyfile(file, out / file.name)


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
    """Largest differences of logits, written to trained model and trained model to base, and largest logit."""

    written: float
    trained: float
    size: float

    @property
    def relative(self) -> float:
        return self.written / max(self.size, 1.0)


def trained_logits(
    folder: Folder, adapter: Path | None, weights: MergedWeights | None, ids: Sequence[Sequence[int]]
) -> tuple[list[Tensor], float]:
    """Return logits of base plus adapter in fp32, and their distance from the base's."""
    # matrices that the run quantised have the numbers that it computed with
    model = load(folder.source.path, folder)
    parameters = dict(model.named_parameters())
    for name in weights.replaced if weights else ():
        own = name if name in parameters else f"{model.base_model_prefix}.{name}"
        parameters[own].data.copy_(weights.base(name) if weights else 0)
    if adapter is None:
        return logits_of(model, ids), 0.0
    from peft import PeftModel

    base = logits_of(model, ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = PeftModel.from_pretrained(model, str(adapter)).eval()
    trained = logits_of(peft, ids)
    return trained, largest_difference(base, trained)


def load(path: str, folder: Folder, **options: Any) -> Any:
    """Load a language model of transformers on the CPU, a small one in fp64, so that rounding hides nothing.

    A checkpoint that holds more than text is loaded whole, because its adapters use the names of the whole.
    """
    silence_advice()
    from transformers import AutoConfig, AutoModelForCausalLM

    from retrain_local.model.composite import is_larger, whole_class
    from retrain_local.model.hf_model import quiet

    options |= {"trust_remote_code": folder.trust_remote_code, "local_files_only": folder.source.offline}
    # The GGUF reader writes a progress bar to standard error.
    with folder.refusals(CPU), quiet(), redirect_stderr(StringIO()):
        config = AutoConfig.from_pretrained(path, **options)
        made = whole_class(config) if is_larger(config) else AutoModelForCausalLM
        model = made.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", **options)
    is_small = sum(p.numel() for p in model.parameters()) <= MOST_IN_64
    # transformers keeps GGUF weights packed in newer versions, and cannot widen them.
    is_packed = getattr(model, "is_quantized", False)
    if not is_small or is_packed:
        return model.eval()
    if hasattr(model, "set_experts_implementation"):  # transformers 5: its grouped product takes no fp64
        model.set_experts_implementation("eager")
    return model.double().eval()


def logits_of(model: Any, ids: Sequence[Sequence[int]]) -> list[Tensor]:
    with torch.no_grad():
        return [model(input_ids=torch.tensor([list(row)]), use_cache=False).logits[0] for row in ids]


def largest_difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


def texts_ids(path: str, folder: Folder, vocabulary: int) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=folder.trust_remote_code)
    rows = tokenizer(list(TEXTS), add_special_tokens=True)["input_ids"]
    return [[token for token in row if token < vocabulary][:MOST_TOKENS] for row in rows]


def quantised_logits(export: ModelExport, folder: Folder, adapter: Path, ids: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return [tokens, vocabulary] of each text, by the run's decoder on the CPU; ConfigError for another adapter."""
    pair = create_pair(export.config, folder.source, trainer_device=CPU, samples=False, seed=0, role="quantised model")
    if misfit := set_adapter(pair, load_file(adapter / ADAPTER_FILE)):
        raise refusal(adapter, code="export.other-base", what=misfit, fix="name the run that trained it")
    found = []
    with torch.no_grad():
        for row in ids:
            spans = Spans.apart((len(row),))
            positions_N = torch.from_numpy(spans.positions())
            hidden_ND = pair.trained.hidden(torch.tensor(list(row)), positions_N, PaddedAttend(spans, CPU))
            found.append(pair.trained.logits(hidden_ND).float())
    return found
