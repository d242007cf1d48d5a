"""Writes a whole model: merge, write, compare, in this order, and refuse a model that does not compare."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from retrain.api import BackendError, Config, ConfigError, ExportedModel, ModelExport, Problem
from retrain_local.export import check, gguf_file
from retrain_local.export.adapter_file import AdapterFile, read_adapter_file
from retrain_local.export.check import quantised_logits
from retrain_local.export.merged import MergedWeights, can_stream, in_order, open_merged
from retrain_local.memory.sizes import AUTO_DTYPE
from retrain_local.model.model_files import CONFIG_FILE, Folder, find_source, open_folder
from retrain_local.model.qlora import without_advice
from retrain_local.model.weights import INDEX, SINGLE
from retrain_local.options import ModelKeys

log = logging.getLogger("retrain")
CPU = torch.device("cpu")
SPARE_BYTES = 64 * 2**20
# Of the largest logit. Weights are rounded once, to the dtype of the files; what is beyond that is a fault.
BOUNDS = {"fp32": 1e-5, "f32": 1e-5, "f16": 0.02, "bf16": 0.1, "q8_0": 0.2}


def export_model(export: ModelExport) -> ExportedModel:
    """See the hook. ConfigError when the parts do not fit together, BackendError when the result is not the model."""
    source = find_source(export.base, export.config.place("model.model"), export.plugins)
    folder = open_folder(export.config, source, export.base)
    adapter = None if export.adapter is None else read_adapter_file(export.adapter)
    quantize = "none" if export.adapter is None else export.config.table("model", ModelKeys).quantize
    dtype, is_gguf = _run_dtype(export.config), export.form == "gguf"
    with ExitStack() as stack:
        weights = None
        with folder.refusals(CPU):
            if can_stream(folder, adapter):
                options = {"quantize": quantize, "dtype": dtype, "progress": export.progress}
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


def _run_dtype(config: Config) -> torch.dtype:
    """What the run computed in, as far as its configuration says, wherever it is merged."""
    asked = config.table("model", ModelKeys).dtype
    auto = AUTO_DTYPE["cuda" if "gpu" in config.backend.devices else "cpu"]
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[auto if asked == "auto" else asked]


def _chosen_dtype(
    export: ModelExport, folder: Folder, adapter: AdapterFile | None, weights: MergedWeights | None
) -> str:
    """The dtype to write; a warning where the base's is narrower than the trained numbers and nobody chose it."""
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
) -> tuple[check.Gap, float | None]:
    tokenizer = folder.source.path if export.form == "gguf" else str(export.out)
    ids = check.texts_ids(tokenizer, folder, int((folder.document.get("text_config") or folder.document)["vocab_size"]))

    def written() -> Any:
        if export.form == "gguf":
            return gguf_file.read_back(export.out, folder)
        return check.load(str(export.out), folder)

    where = adapter.folder if adapter else None
    gap = check.measure(lambda: check.trained_logits(folder, where, weights, ids), written, ids)
    refuse_gap(gap, kind, export)
    if adapter is None or weights is None or not weights.replaced:
        return gap, None
    found = check.logits_of(written(), ids)
    return gap, check.largest_difference(quantised_logits(export, folder, adapter.folder, ids), found)


def refuse_gap(gap: check.Gap, kind: str, export: ModelExport) -> None:
    """BackendError when what was written is not the trained model, rounded to its dtype."""
    if gap.relative <= BOUNDS[kind]:  # False for NaN
        return
    what = f"the logits of what was written differ by {gap.written:.3g} from those of the trained model"
    why = f"in {kind} at most {BOUNDS[kind] * max(gap.size, 1.0):.3g} is rounding"
    fix = "nothing was kept; an adapter of an embedding that the head shares cannot be merged, anything else is a fault"
    if not math.isfinite(gap.written):
        fix = "nothing was kept; use an earlier checkpoint: this one gives logits that are not finite"
    raise BackendError(Problem(where=export.base, what=what, why=why, fix=fix))


def _write_by_peft(
    export: ModelExport, folder: Folder, adapter: AdapterFile | None, dtype: torch.dtype
) -> tuple[int, tuple[str, ...]]:
    """Merged by PEFT, in memory: for more than factors of matrices in the base's files. Returns tensors and notes."""
    if export.form == "gguf" or adapter is None:
        what = f"the adapter in {export.adapter} changes more than matrices of {export.base}"
        fix = "merge it into a folder first: --format transformers"
        raise ConfigError(Problem(where=export.base, what=what, fix=fix))
    with without_advice():
        from peft import PeftModel

    model = check.load(folder.source.path, folder)
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
        raise ConfigError(Problem(where=str(out.parent), what=what, fix="free some space, or name another folder"))


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """BackendError for a failed write, which every library reports in its own way."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        fix = "free some space, or name another folder; nothing was kept"
        raise BackendError(Problem(where=str(out.parent), what=f"cannot be written: {error}", fix=fix)) from error


SHARD_BYTES = 4 * 2**30
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
STORED_AS = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
# What a model's folder may hold beside its weights and is not to be copied: other weights, and a checkpoint's state.
NOT_COPIED = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx"),
    *("adapter_config.json", "backend_state.json", "checkpoint.json", "checksums.json", "sampler_limits.json"),
    *("config.json", "README.md", ".*"),
)
MOST_COPIED_BYTES = 200 * 2**20  # of one file; a tokenizer has up to 40 MB


def write_model(weights: MergedWeights, folder: Folder, out: Path, dtype: torch.dtype) -> None:
    """Write config, companions and every tensor into an existing empty folder, at most one shard in memory."""
    document = {key: value for key, value in folder.document.items() if key != "torch_dtype"}
    _write_json(out / CONFIG_FILE, document | {"dtype": STORED_AS[dtype]})
    copy_companions(folder, out)
    shards: list[list[str]] = [[]]
    size = 0
    for name in in_order(weights.names()):
        size += weights.num_bytes(name, dtype)
        if shards[-1] and size > SHARD_BYTES:
            shards.append([])
            size = weights.num_bytes(name, dtype)
        shards[-1].append(name)
    index: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _as(weights.tensor(name), dtype) for name in names}
        save_file(tensors, out / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(weights.num_bytes(name, dtype) for name in index)
        _write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def copy_companions(folder: Folder, out: Path) -> None:
    """Copy tokenizer, chat template, generation config, licence and code of the model, not its weights."""
    source = Path(folder.source.path)
    if not source.is_dir():
        files = [*folder.companions()]
    else:
        files = [path for path in sorted(source.iterdir()) if not any(path.match(each) for each in NOT_COPIED)]
    for file in files:
        if file.is_file() and file.stat().st_size <= MOST_COPIED_BYTES:
            shutil.copyfile(file, out / file.name)


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
