"""Configurations that the engine `pytorch` refuses, checked before anything heavy is imported."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from retrain.api import Config, ConfigError, Plugins, Problem, locate_adapter
from retrain_local.options import LoraKeys, ModelKeys

ENGINE = "pytorch"
UNSERVED = {  # values of [inference] dtype
    "fp4": "PyTorch has no kernel that computes with 4-bit weights",
    "fp8": "8-bit weights save neither time nor memory: they come on top of the trained ones",
}
GPU_ONLY = {  # values of [inference] attention_kernel
    "flash": "PyTorch's flash attention over packed rows runs on CUDA alone",
    "triton": "Triton compiles for GPUs",
    "tk": "its kernels are CUDA's",
    "cutlass": "its kernels are CUDA's",
}
OURS = 'remove it, or use backend = "local"'
FOREIGN = (  # keys that are ours, their defaults, and what to do under another backend
    ("model.dtype", "auto", "remove it, and set the dtype where that backend's trainer is configured"),
    ("model.quantize", "none", OURS),
    ("model.adapter", "", OURS),
    ("lora.rslora", False, OURS),
    ("lora.dora", False, OURS),
)
NOT_WITH_ALL: dict[str, tuple[Any, str]] = {  # the default that goes, and why no other does
    "entropy.coef": (0.0, "the entropy has no gradient for the head, which is trained too"),
    "lora.alpha": (0, "there is no adapter to scale"),
    "lora.rslora": (False, "there is no adapter to scale"),
    "lora.dora": (False, "there is no adapter"),
    "model.adapter": ("", "an adapter needs a rank"),
}
BEYOND_LORA = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern")  # empty in plain LoRA
SERVED_KINDS = {"rslora": (ENGINE, "vllm"), "dora": (ENGINE,)}  # engines that scale as asked
GPU = re.compile(r"gpu:(\d+)")
DEVICE_FIX = 'write "cpu" or "gpu:0", or several: "gpu:0,gpu:1" samples on the first and trains on the last'
# Names of PyTorch and of other programs, and the fix for each.
OTHER_NAMES = {"cuda": 'write "gpu:0" for a CUDA GPU, or "cpu"', "mps": 'write "cpu": backend local has no mps'}
TWO = {True: "cpu,cpu", False: "gpu:0,gpu:1"}  # by whether they are CPUs


def config_problems(config: Config, plugins: Plugins, *, will_run: bool) -> list[Problem]:
    """Everything wrong with a configuration for this backend, or with our keys under another one."""
    if config.backend.backend != "local":
        return foreign_keys(config)
    problems = [*problems_of(config), *quantize_problems(config, will_run=will_run), *adapter_kind_problems(config)]
    problems += [*staleness_problems(config), *parallel_problems(config), *device_problems(config)]
    start = start_problems(config) if config.model.lora_rank else full_problems(config)
    return [*problems, *adapter_problems(config, plugins), *start]


def problems_of(config: Config) -> list[Problem]:
    """Values of `[inference]` that no device supports, or that a CPU named in the configuration does not.

    Whatever depends on a GPU's generation or on an installed package is checked when the engine is created.
    """
    if config.inference.engine != ENGINE:
        return []
    problems, name = [], config.inference.attention_kernel
    if why := UNSERVED.get(config.inference.dtype, ""):
        what, fix = f"dtype = {config.inference.dtype!r} is refused", 'use "bf16", or "auto"'
        problems.append(Problem(where=config.place("inference.dtype"), what=what, why=why, fix=fix))
    if name in GPU_ONLY and _is_cpu(config.backend.devices):
        what = f"attention_kernel = {name!r} is refused with devices = {config.backend.devices!r}"
        fix = 'set [backend] devices = "gpu:0", or use "default"'
        where = config.place("inference.attention_kernel")
        problems.append(Problem(where=where, what=what, why=GPU_ONLY[name], fix=fix))
    return problems


def device_problems(config: Config) -> list[Problem]:
    """Names in `[backend] devices` that are not devices, and a list that mixes a CPU with GPUs."""
    names, where = [name.strip() for name in config.backend.devices.split(",")], config.place("backend.devices")
    wrong = [name for name in names if name != "cpu" and not GPU.fullmatch(name)]
    if wrong:
        kind, _, index = wrong[0].lower().partition(":")
        fix = OTHER_NAMES.get(kind, DEVICE_FIX).replace("gpu:0", f"gpu:{index}" if index.isdecimal() else "gpu:0", 1)
        return [Problem(where=where, what=f"{wrong[0]!r} is not a device", fix=fix)]
    if len({name == "cpu" for name in names}) > 1:
        what = f"{config.backend.devices!r} names a CPU and a GPU, which do not compute the same policy"
        return [Problem(where=where, what=what, fix='list only GPUs, "gpu:0,gpu:1"')]
    return []


def full_problems(config: Config) -> list[Problem]:
    """What does not go with `lora_rank = 0`: whatever takes an adapter, and what is added to the loss from the head."""
    if config.model.lora_rank:
        return []
    asked = [(path, what) for path, (default, what) in NOT_WITH_ALL.items() if config.value(path, default) != default]
    engine = config.inference.engine
    found = [
        Problem(
            where=config.place(path),
            what=f"{path.rpartition('.')[2]} = {json.dumps(config.value(path, None))} does not go with lora_rank = 0",
            why=why,
            fix="remove it, or train an adapter: set [model] lora_rank to 32",
        )
        for path, why in asked
    ]
    if engine != ENGINE:
        what, why = (
            f"engine = {engine!r} does not go with lora_rank = 0",
            "it samples from an adapter on a model that it loads once",
        )
        fix = f'use engine = "{ENGINE}", or train an adapter: set [model] lora_rank to 32'
        found.append(Problem(where=config.place("inference.engine"), what=what, why=why, fix=fix))
    return found


def parallel_problems(config: Config) -> list[Problem]:
    """What does not go with `[backend.options] parallel`."""
    if config.backend.options.get("parallel") != "fsdp" or not config.model.lora_rank:
        return []
    where, what = f"{config.place('backend.options')}.parallel", "'fsdp' does not go with an adapter"
    why = "it shards what is trained, which is small here; the frozen weights are needed whole on each device to sample"
    fix = 'set it to "replicate", or train all weights with [model] lora_rank = 0'
    return [Problem(where=where, what=what, why=why, fix=fix)]


def quantize_problems(config: Config, *, will_run: bool = True) -> list[Problem]:
    """What does not go with `[model] quantize`, and the package that 4 bits need to run."""
    kind = config.table("model", ModelKeys).quantize
    if kind == "none":
        return []
    where, engine = config.place("model.quantize"), config.inference.engine
    found = []
    if kind == "nf4" and will_run and find_spec("bitsandbytes") is None:
        what, fix = "quantize = 'nf4' needs bitsandbytes", 'pip install "retrain-local[quantize]", or use "int8"'
        found.append(Problem(where=where, what=what, fix=fix))
    if not config.model.lora_rank:
        what, why = f"quantize = {kind!r} does not go with lora_rank = 0", "quantised weights cannot be trained"
        found.append(Problem(where=where, what=what, why=why, fix="remove it, or set [model] lora_rank to 32"))
    if engine != ENGINE:
        what, why = f"engine = {engine!r} does not go with quantize = {kind!r}", "it samples from other weights"
        place, fix = config.place("inference.engine"), f'use engine = "{ENGINE}", or quantize = "none"'
        found.append(Problem(where=place, what=what, why=why, fix=fix))
    return found


def staleness_problems(config: Config) -> list[Problem]:
    """Sampling ahead where a device does one thing at a time: on one device without servers, and on ranks."""
    most, engine = config.training.max_staleness, config.inference.engine
    is_one, parallel = "," not in config.backend.devices, config.backend.options.get("parallel", "split")
    if most < 1 or not (is_one or parallel != "split"):
        return []
    if is_one and engine != ENGINE and config.inference.logprobs != "trainer":
        return []
    if is_one and engine != ENGINE:
        what = f"logprobs = 'trainer' does not go with max_staleness = {most}"
        why, fix = "the trainer is busy while they sample", "use the engine's log-probabilities, or max_staleness = 0"
        return [Problem(where=config.place("inference.logprobs"), what=what, why=why, fix=fix)]
    if is_one:
        what = f"max_staleness = {most}: with devices = {config.backend.devices!r} at most 0"
        why = "one device samples and trains in turn"
        fix = f'list two devices, such as "{TWO[_is_cpu(config.backend.devices)]}", or sample from servers'
    else:
        what = f"max_staleness = {most}: with [backend.options] parallel = {parallel!r} at most 0"
        why, fix = "every device samples and trains in turn", 'set parallel to "split"'
    return [Problem(where=config.place("training.max_staleness"), what=what, why=why, fix=f"{fix}, or remove it")]


def foreign_keys(config: Config) -> list[Problem]:
    """Keys of `[model]` and `[lora]` that no other backend reads, set under another backend."""
    problems, backend = [], config.backend.backend
    for path, default, fix in FOREIGN:
        name, value = path.partition(".")[2], config.value(path, default)
        if value != default:
            what = f"{name} = {value!r} would have no effect: backend {backend!r} does not read it"
            problems.append(Problem(where=config.place(path), what=what, fix=fix))
    return problems


def adapter_problems(config: Config, plugins: Plugins) -> list[Problem]:
    """Why `--resume-anyway` cannot continue the run's adapter with another rank, or a model of another shape.

    A plain resume names the differing keys itself.
    """
    run = config.resume.from_
    if not run or not config.resume.anyway:
        return []
    saved = Path(config.backend.adapter_path or Path(run, "adapter")).expanduser()
    adapters = (found for folder in sorted(saved.glob("*")) if (found := _adapter_sizes(folder)))
    adapter, model = next(adapters, {}), _model_sizes(config, plugins)
    wanted: dict[str, tuple[Any, Any]] = {"model.lora_rank": (adapter.get("rank"), config.model.lora_rank)}
    wanted["model.model"] = (adapter.get("shape"), model or adapter.get("shape"))
    return [
        Problem(
            where=config.place(path),
            what=f"is {now}, and the adapter of this run has {before}",
            why="--resume-anyway cannot change that",
            fix=f"set it to {before}, or start a new run" if path == "model.lora_rank" else "name the run's own model",
        )
        for path, (before, now) in wanted.items()
        if before is not None and before != now
    ]


def _adapter_sizes(folder: Path) -> dict[str, Any]:
    """Rank of a checkpoint's adapter, and the shape of its model; {} for one that resuming will find damaged."""
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
    """Shape of a local model; empty for one on the hub, and where its configuration names the sizes otherwise."""
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
    """Why the adapter of `[model] adapter` cannot be what this run starts from, as far as its configuration says."""
    if not config.table("model", ModelKeys).adapter:
        return []
    where, path = config.place("model.adapter"), config.table("model", ModelKeys).adapter
    try:
        folder = locate_adapter(path)
        document = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        found = {name: int(document[name]) for name in ("r", "lora_alpha")}
    except ConfigError as error:
        return [Problem(where=where, what=f"{each.where}: {each.what}", fix=each.fix) for each in error.problems]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"adapter_config.json of {path} cannot be read: {type(error).__name__}: {error}"
        return [Problem(where=where, what=what, fix="give an adapter folder that PEFT wrote, or a run")]
    problems = _different(config, folder, document, found)
    odd = [name for name in BEYOND_LORA if document.get(name)]
    odd += ["bias"] if document.get("bias", "none") != "none" else []
    if odd:
        what = f"the adapter in {folder} is not plain LoRA: it sets {', '.join(odd)}"
        fix = "merge it into its model, or start from a plain LoRA adapter"
        problems.append(Problem(where=where, what=what, fix=fix))
    return problems


def _different(config: Config, folder: Path, document: Mapping[str, Any], found: Mapping[str, int]) -> list[Problem]:
    """Rank and scale that differ from the adapter's: its matrices have that rank, and were trained at that scale."""
    rank, keys = config.model.lora_rank, config.table("lora", LoraKeys)
    alpha, has_rslora = config.lora.alpha or 2 * rank, bool(document.get("use_rslora"))
    problems = []

    def differs(key: str, now: Any, before: str, fix: Any, why: str = "") -> None:
        what = f"is {json.dumps(now)}, and the adapter in {folder} {before}"
        problems.append(
            Problem(where=config.place(key), what=what, why=why, fix=f"set {key.partition('.')[2]} = {fix}")
        )

    if found["r"] != rank:
        differs("model.lora_rank", rank, f"has rank {found['r']}", found["r"])
    elif found["lora_alpha"] != alpha:
        why = "another alpha would scale what it has learned"
        differs("lora.alpha", alpha, f"was trained with {found['lora_alpha']}", found["lora_alpha"], why)
    if has_rslora != keys.rslora:
        has = json.dumps(has_rslora)
        differs("lora.rslora", keys.rslora, f"was trained with use_rslora = {has}", has, "its scale would be another")
    if keys.dora:
        differs("lora.dora", True, "has no magnitudes", "false")
    return problems


def adapter_kind_problems(config: Config) -> list[Problem]:
    """What does not go with `[lora] rslora` and `dora`."""
    problems, engine = [], config.inference.engine
    for name, engines in SERVED_KINDS.items():
        if config.value(f"lora.{name}", False) and engine not in engines:
            what = f"engine = {engine!r} does not go with [lora] {name}"
            why, fix = f"it is known to apply it in {', '.join(engines)} only", f'use engine = "{ENGINE}"'
            problems.append(Problem(where=config.place("inference.engine"), what=what, why=why, fix=fix))
    if config.table("lora", LoraKeys).dora and config.table("model", ModelKeys).quantize != "none":
        what, fix = "does not go with dora = true", 'set quantize = "none", or dora = false'
        why = "PEFT's modules, which apply it, are not quantised here"
        problems.append(Problem(where=config.place("model.quantize"), what=what, why=why, fix=fix))
    return problems


def foreign_engine(config: Config) -> Problem:
    """Why another engine cannot be used when several devices sample and train at once.

    Checked when the backend is created: a campaign lists several devices to distribute its runs over them.
    """
    name = config.inference.engine
    what = f"{config.backend.devices!r} lists several devices, but engine {name!r} does not sample on any of them"
    why = "it samples elsewhere, and checks its log-probabilities against a model that would be training meanwhile"
    if config.backend.options.get("parallel", "split") != "split":
        why = "with ranks each samples its share from the weights that it trains"
    return Problem(where=config.place("backend.devices"), what=what, why=why, fix="list one device, the trainer's")


def _is_cpu(devices: str) -> bool:
    """Whether the sampling devices (all but the last of several) are CPUs."""
    names = [name.strip() for name in devices.split(",")]
    return all(name == "cpu" for name in names[:-1] or names)
