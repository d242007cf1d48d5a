"""Configurations that the engine `pytorch` refuses, checked before anything heavy is imported."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from retrain.api import Config, ConfigError, Plugins, Problem, locate_adapter
from retrain_local.options import LoraKeys, ModelKeys

ENGINE = "pytorch"
REFUSED_DTYPES = {  # of [inference] dtype
    "fp4": "PyTorch has no kernel that computes with 4-bit weights",
    "fp8": "8-bit weights save neither time nor memory: they are held in addition to the trained ones",
}
GPU_ONLY = {  # values of [inference] attention_kernel
    "flash": "PyTorch's flash attention over packed rows runs only on CUDA",
    "triton": "Triton compiles for GPUs",
    "tk": "its kernels are CUDA's",
    "cutlass": "its kernels are CUDA's",
}
LOCAL_ONLY = 'or use backend = "local"'
LOCAL_KEYS = (  # keys of this backend, their defaults, and the fix under another backend
    ("model.dtype", "auto", "and set the dtype where that backend's trainer is configured"),
    ("model.quantize", "none", LOCAL_ONLY),
    ("model.adapter", "", LOCAL_ONLY),
    ("lora.rslora", False, LOCAL_ONLY),
    ("lora.dora", False, LOCAL_ONLY),
    ("lora.targets", ["all-linear"], LOCAL_ONLY),
)
NOT_WITH_ALL: dict[str, tuple[Any, str]] = {  # the one permitted value, and why
    "entropy.coef": (0.0, "the entropy has no gradient for the trained head"),
    "lora.alpha": (0, "there is no adapter to scale"),
    "lora.rslora": (False, "there is no adapter to scale"),
    "lora.dora": (False, "there is no adapter"),
    "lora.targets": (["all-linear"], "there is no adapter"),
    "model.adapter": ("", "an adapter needs a rank"),
}
BEYOND_LORA = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern")  # empty in plain LoRA
SERVED_KINDS = {"rslora": (ENGINE, "vllm"), "dora": (ENGINE,)}  # engines known to apply it
GPU = re.compile(r"gpu:(\d+)")
DEVICE_FIX = 'write "cpu" or "gpu:0", or several: "gpu:0,gpu:1" samples on the first and trains on the last'
# Names that PyTorch and other programs use, and the fix for each.
OTHER_NAMES = {"cuda": 'write "gpu:0" for a CUDA GPU, or "cpu"', "mps": 'write "cpu": backend local has no mps'}
TWO = {True: "cpu,cpu", False: "gpu:0,gpu:1"}  # by `_is_cpu`


def config_problems(config: Config, plugins: Plugins, *, will_run: bool) -> list[Problem]:
    if config.backend.backend != "local":
        return foreign_keys(config)
    problems = [*problems_of(config), *quantize_problems(config, will_run=will_run), *adapter_kind_problems(config)]
    problems += [*staleness_problems(config), *parallel_problems(config), *device_problems(config)]
    start = start_problems(config) if config.model.lora_rank else full_problems(config)
    return [*problems, *adapter_problems(config, plugins), *start]


def _problem(config: Config, key: str, *, code: str, what: str, fix: str, why: str = "") -> Problem:
    return Problem(code=code, where=config.place(key), what=what, why=why, fix=fix)


def problems_of(config: Config) -> list[Problem]:
    """Find values of `[inference]` that no device supports, or that a CPU named in the configuration does not."""
    # a GPU's generation and installed packages are checked when the engine is created
    if config.inference.engine != ENGINE:
        return []
    problems, dtype, name = [], config.inference.dtype, config.inference.attention_kernel
    if why := REFUSED_DTYPES.get(dtype, ""):
        what, fix = f"dtype = {dtype!r} is refused", 'use "bf16", or "auto"'
        problems.append(_problem(config, "inference.dtype", code="engine.dtype-refused", what=what, fix=fix, why=why))
    if name in GPU_ONLY and _is_cpu(config.backend.devices):
        what = f"attention_kernel = {name!r} needs a GPU, and devices = {config.backend.devices!r}"
        fix, key = 'set [backend] devices = "gpu:0", or use "default"', "inference.attention_kernel"
        problems.append(_problem(config, key, code="engine.kernel-needs-gpu", what=what, fix=fix, why=GPU_ONLY[name]))
    return problems


def device_problems(config: Config) -> list[Problem]:
    names = [name.strip() for name in config.backend.devices.split(",")]
    wrong = [name for name in names if name != "cpu" and not GPU.fullmatch(name)]
    if wrong:
        kind, _, index = wrong[0].lower().partition(":")
        gpu = f"gpu:{index}" if index.isdecimal() else "gpu:0"
        fix = (OTHER_NAMES.get(kind) or DEVICE_FIX).replace("gpu:0", gpu, 1)
        what = f"{wrong[0]!r} is not a device"
        return [_problem(config, "backend.devices", code="device.unknown-name", what=what, fix=fix)]
    if len({name == "cpu" for name in names}) > 1:
        what = f"{config.backend.devices!r} names a CPU and a GPU, and they do not compute the same policy"
        fix = 'list only GPUs, "gpu:0,gpu:1"'
        return [_problem(config, "backend.devices", code="device.mixed-kinds", what=what, fix=fix)]
    return []


def full_problems(config: Config) -> list[Problem]:
    """Find keys that do not go with `lora_rank = 0`: an adapter's, and losses computed from the head."""
    found, trains = [], "train an adapter: set [model] lora_rank to 32"
    for path, (default, why) in NOT_WITH_ALL.items():
        if (value := config.value(path, default)) != default:
            what = f"{path.rpartition('.')[2]} = {json.dumps(value)} does not go with lora_rank = 0"
            fix = f"remove it, or {trains}"
            found.append(_problem(config, path, code="config.not-with-rank-0", what=what, fix=fix, why=why))
    if config.inference.engine != ENGINE:
        what = f"engine = {config.inference.engine!r} does not go with lora_rank = 0"
        fix, why = f'use engine = "{ENGINE}", or {trains}', "it samples from an adapter on a model that it loads once"
        found.append(_problem(config, "inference.engine", code="engine.needs-adapter", what=what, fix=fix, why=why))
    return found


def parallel_problems(config: Config) -> list[Problem]:
    if config.backend.options.get("parallel") != "fsdp" or not config.model.lora_rank:
        return []
    where, what = f"{config.place('backend.options')}.parallel", "'fsdp' does not go with an adapter"
    why = "it shards trained weights, and an adapter has few; each device needs the frozen weights to sample"
    fix = 'set it to "replicate", or train all weights with [model] lora_rank = 0'
    return [Problem(code="backend.fsdp-with-adapter", where=where, what=what, why=why, fix=fix)]


def quantize_problems(config: Config, *, will_run: bool = True) -> list[Problem]:
    """Find keys that do not go with `[model] quantize`, and the missing package that 4 bits need to run."""
    kind, engine, key = config.table("model", ModelKeys).quantize, config.inference.engine, "model.quantize"
    if kind == "none":
        return []
    found = []
    if kind == "nf4" and will_run and find_spec("bitsandbytes") is None:
        what, fix = "quantize = 'nf4' needs bitsandbytes", 'pip install "retrain-local[quantize]", or use "int8"'
        found.append(_problem(config, key, code="model.needs-bitsandbytes", what=what, fix=fix))
    if not config.model.lora_rank:
        what, fix = f"quantize = {kind!r} does not go with lora_rank = 0", "remove it, or set [model] lora_rank to 32"
        why = "quantised weights cannot be trained"
        found.append(_problem(config, key, code="model.quantised-training", what=what, fix=fix, why=why))
    if engine != ENGINE:
        what = f"engine = {engine!r} does not go with quantize = {kind!r}"
        why = "the engine would sample from weights that are not quantised"
        fix = f'use engine = "{ENGINE}", or quantize = "none"'
        found.append(_problem(config, "inference.engine", code="engine.not-quantised", what=what, fix=fix, why=why))
    return found


def staleness_problems(config: Config) -> list[Problem]:
    """Find sampling ahead where a device does one thing at a time: on one device without servers, and on ranks."""
    most, has_servers = config.training.max_staleness, config.inference.engine != ENGINE
    is_one, parallel = "," not in config.backend.devices, config.backend.options.get("parallel", "split")
    if most < 1 or not (is_one or parallel != "split"):
        return []
    if is_one and has_servers:
        if config.inference.logprobs != "trainer":
            return []
        what = f"logprobs = 'trainer' does not go with max_staleness = {most}"
        fix, why = "use the engine's log-probabilities, or max_staleness = 0", "the trainer is busy while they sample"
        return [_problem(config, "inference.logprobs", code="config.trainer-busy", what=what, fix=fix, why=why)]
    if is_one:
        setting, device = f"devices = {config.backend.devices!r}", "one device"
        fix = f'list two devices, such as "{TWO[_is_cpu(config.backend.devices)]}", sample from servers, or remove it'
    else:
        setting, device = f"[backend.options] parallel = {parallel!r}", "every device"
        fix = 'set parallel to "split", or remove it'
    what, why = f"max_staleness = {most}: with {setting} at most 0", f"{device} samples and trains in turn"
    return [_problem(config, "training.max_staleness", code="config.no-overlap", what=what, fix=fix, why=why)]


def foreign_keys(config: Config) -> list[Problem]:
    problems, effect = [], f"would have no effect: backend {config.backend.backend!r} does not read it"
    for path, default, fix in LOCAL_KEYS:
        if (value := config.value(path, default)) != default:
            what = f"{path.partition('.')[2]} = {value!r} {effect}"
            problems.append(_problem(config, path, code="config.without-effect", what=what, fix=f"remove it, {fix}"))
    return problems


def adapter_problems(config: Config, plugins: Plugins) -> list[Problem]:
    """Find why `--resume-anyway` cannot continue the run's adapter: another rank, or a model of another shape."""
    # a plain resume names the differing keys itself
    run = config.resume.from_
    if not run or not config.resume.anyway:
        return []
    saved = Path(config.backend.adapter_path or Path(run, "adapter")).expanduser()
    adapters = (found for folder in sorted(saved.glob("*")) if (found := _adapter_sizes(folder)))
    adapter, model = next(adapters, {}), _model_sizes(config, plugins)
    rank, shape, problems = adapter.get("rank"), adapter.get("shape"), []
    for path, before, now, fix in (
        ("model.lora_rank", rank, config.model.lora_rank, f"set it to {rank}"),
        ("model.model", shape, model or shape, "name the run's own model"),
    ):
        if before is not None and before != now:
            what, why = f"is {now}, and the adapter of this run has {before}", "--resume-anyway cannot change that"
            fix = f"{fix}, or start a new run"
            problems.append(_problem(config, path, code="resume.other-adapter", what=what, fix=fix, why=why))
    return problems


def _adapter_sizes(folder: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    if (folder / "model.safetensors").is_file():
        return {"rank": 0}
    try:
        rank = int(json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["r"])
        with safe_open(folder / "adapter_model.safetensors", framework="numpy") as stream:
            names = stream.keys()
            layers = {int(found[1]) for name in names if (found := re.search(r"\.layers\.(\d+)\.", name))}
            inputs = [name for name in names if name.endswith(".q_proj.lora_A.weight")]
            width = stream.get_slice(inputs[0]).get_shape()[1] if inputs else 0
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError):
        return {}
    return {"rank": rank, "shape": _shape(max(layers, default=-1) + 1, width) if layers and width else None}


def _model_sizes(config: Config, plugins: Plugins) -> str:
    """Read the shape of a local model; empty for one on the hub, and where its sizes have other names."""
    name = config.model.model
    folder = Path(plugins.locate_model(name) or name).expanduser()
    try:
        sizes = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return _shape(int(sizes["num_hidden_layers"]), int(sizes["hidden_size"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def _shape(layers: int, width: int) -> str:
    return f"{layers} layers of width {width}"


def start_problems(config: Config) -> list[Problem]:
    path, key = config.table("model", ModelKeys).adapter, "model.adapter"
    if not path:
        return []
    try:
        folder = locate_adapter(path)
        document = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        found = {name: int(document[name]) for name in ("r", "lora_alpha")}
    except ConfigError as error:
        return [replace(each, where=config.place(key), what=f"{each.where}: {each.what}") for each in error.problems]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"adapter_config.json of {path} cannot be read: {type(error).__name__}: {error}"
        fix = "give an adapter folder that PEFT wrote, or a run"
        return [_problem(config, key, code="model.adapter-unreadable", what=what, fix=fix)]
    problems = _different(config, folder, document, found)
    odd = [name for name in BEYOND_LORA if document.get(name)]
    odd += ["bias"] if document.get("bias", "none") != "none" else []
    if odd:
        what = f"the adapter in {folder} is not plain LoRA: it sets {', '.join(odd)}"
        fix = "merge it into its model, or start from a plain LoRA adapter"
        problems.append(_problem(config, key, code="model.adapter-not-plain", what=what, fix=fix))
    return problems


def _different(config: Config, folder: Path, document: Mapping[str, Any], found: Mapping[str, int]) -> list[Problem]:
    rank, keys = config.model.lora_rank, config.table("lora", LoraKeys)
    alpha, has_rslora = config.lora.alpha or 2 * rank, bool(document.get("use_rslora"))
    problems = []

    def differs(key: str, now: Any, before: str, value: Any, why: str = "") -> None:
        what = f"is {json.dumps(now)}, and the adapter in {folder} {before}"
        fix = f"set {key.partition('.')[2]} = {value}"
        problems.append(_problem(config, key, code="model.adapter-differs", what=what, fix=fix, why=why))

    if found["r"] != rank:
        differs("model.lora_rank", rank, f"has rank {found['r']}", found["r"])
    elif found["lora_alpha"] != alpha:
        why = "another alpha would scale the update that it has learned"
        differs("lora.alpha", alpha, f"was trained with {found['lora_alpha']}", found["lora_alpha"], why)
    if has_rslora != keys.rslora:
        has = json.dumps(has_rslora)
        differs("lora.rslora", keys.rslora, f"was trained with use_rslora = {has}", has, "its scale would be another")
    if keys.dora:
        differs("lora.dora", True, "has no magnitudes", "false")
    return problems


def adapter_kind_problems(config: Config) -> list[Problem]:
    problems, engine = [], config.inference.engine
    for name, engines in SERVED_KINDS.items():
        if config.value(f"lora.{name}", False) and engine not in engines:
            what, fix = f"engine = {engine!r} does not go with [lora] {name}", f'use engine = "{ENGINE}"'
            why = f"{', '.join(engines)} apply it, other engines are not known to"
            problems += [_problem(config, "inference.engine", code="engine.adapter-kind", what=what, fix=fix, why=why)]
    if config.table("lora", LoraKeys).dora and config.table("model", ModelKeys).quantize != "none":
        what, fix = "does not go with dora = true", 'set quantize = "none", or dora = false'
        why = "PEFT's modules apply it, and they are not quantised"
        problems.append(_problem(config, "model.quantize", code="model.dora-quantised", what=what, fix=fix, why=why))
    return problems


def foreign_engine(config: Config) -> Problem:
    """Return why another engine cannot be used when several devices sample and train at once."""
    # checked when the backend is created: a campaign lists several devices to distribute its runs over them
    name = config.inference.engine
    what = f"{config.backend.devices!r} lists several devices, but engine {name!r} does not sample on any of them"
    why = "a server is checked against the trained model's log-probabilities, while training continues"
    if config.backend.options.get("parallel", "split") != "split":
        why = "with ranks each samples its share from the weights that it trains"
    fix = "list one device, the trainer's"
    return _problem(config, "backend.devices", code="engine.not-on-devices", what=what, fix=fix, why=why)


def _is_cpu(devices: str) -> bool:
    """True if the sampling devices (all but the last of several) are CPUs."""
    names = [name.strip() for name in devices.split(",")]
    return all(name == "cpu" for name in names[:-1] or names)
