"""`python -m tests.models`: every causal type of transformers, small and random, through the local backend.

Each is loaded, trained with an adapter and with all weights, compared with transformers and PEFT, killed and resumed.
`--write` puts the table into the documentation. Names of types as arguments limit the run.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers

from retrain.api import ModelExport, RetrainError, TrainBatch
from retrain_local.export.write import export_model
from retrain_local.model import projection
from tests.kit.causal_types import CAUSAL_TYPES, COMPOSITES, small_composite, small_model
from tests.kit.local_backend import REQUESTS, Local, check_same_rows, saved
from tests.kit.plain_path import distance, gradient, joined, own_gap, plain_gradient

TABLE = Path(__file__).parents[2] / "docs/pages/models.md"
MARKS = "<!-- matrix -->\n", "<!-- end matrix -->\n"
WITHIN = 1e-4  # in fp32
PACK_TOKENS = 20  # about a row, so that several packs are computed at a time


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What was seen of one type; `fault` says what went wrong, `refused` is the error that a user would read."""

    kind: str
    tier: str = ""
    gap: float = 0.0
    gradient: float = 0.0
    resumes: bool = False
    all_weights: bool = False
    merges: bool = False
    refused: str = ""
    faults: list[str] = field(default_factory=list)

    @property
    def is_trained(self) -> bool:
        return bool(self.tier) and not self.faults

    def row(self) -> str:
        marks = ("yes" if each else "no" for each in (self.resumes, self.all_weights, self.merges))
        gap = max(self.gap, self.gradient)
        return f"| `{self.kind}` | {self.tier} | {gap:.0e} | {' | '.join(marks)} |"


def tried(kind: str, model: Any, folder: Path) -> Outcome:
    seen = Outcome(kind=kind)
    model.save_pretrained(folder / "model")
    local = Local(folder=folder / "model", requests=REQUESTS)
    try:
        _with_adapter(local, type(model), seen, folder)
        _with_all_weights(local, type(model), seen, folder)
    except RetrainError as error:
        seen.refused = str(error).replace("\n", " ")
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        seen.faults.append(f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})")
    return seen


def _with_adapter(local: Local, made: Any, seen: Outcome, folder: Path) -> None:
    backend = local.make()
    seen.tier = backend._pair.trained.tier
    for step in range(2):
        backend.train(_rolled(local, backend, step))
        backend.publish()
    batch = _rolled(local, backend, 2)
    adapter = saved(folder / "adapter", backend.save_adapter)
    whole = made.from_pretrained(folder / "model")
    reference = peft.PeftModel.from_pretrained(whole, str(adapter), is_trainable=True).eval()
    seen.gap = own_gap(reference, batch)
    expected, gaps = joined(plain_gradient(batch, reference)), []
    for most in (0, PACK_TOKENS):
        found = gradient(backend, batch, max_tokens=most)
        gaps.append(distance(found, expected) if len(found) == len(expected) else float("nan"))
    seen.gradient = float(np.max(gaps))  # NaN stays NaN
    if not (seen.gap < WITHIN and seen.gradient < WITHIN):  # NaN is not
        seen.faults.append(f"log-probabilities differ by {seen.gap:.1e}, gradients by {seen.gradient:.1e}")
    resumed = local.make()
    resumed.load(saved(folder / "state", backend.save))
    seen.resumes = _same(*(_rolled(local, each, 3) for each in (backend, resumed)))
    (folder / "merged").mkdir()
    given = {"base": str(folder / "model"), "adapter": adapter, "out": folder / "merged", "form": "folder", "dtype": ""}
    context = local.context()
    export_model(ModelExport(**given, with_check=False, config=context.config, plugins=context.plugins))
    seen.merges = own_gap(made.from_pretrained(folder / "merged").eval(), batch) < WITHIN


def _with_all_weights(local: Local, made: Any, seen: Outcome, folder: Path) -> None:
    backend = local.make(rank=0)
    for step in range(2):
        backend.train(_rolled(local, backend, step))
        backend.publish()
    batch = _rolled(local, backend, 2)
    written = saved(folder / "all", backend.save_adapter)
    seen.all_weights = own_gap(made.from_pretrained(written).eval(), batch) < WITHIN


def _rolled(local: Local, backend: Any, step: int) -> TrainBatch:
    return local.roll(backend, step=step, max_tokens=12)


def _same(left: TrainBatch, right: TrainBatch) -> bool:
    try:
        check_same_rows(left, right)
    except AssertionError:
        return False
    return True


def _models(kinds: Sequence[str]) -> Iterator[tuple[str, Any, str]]:
    """Yield each type with its small model, or with why it could not be made."""
    for kind in kinds or (*CAUSAL_TYPES, *(f"{name} (text)" for name in COMPOSITES)):
        name = kind.removesuffix(" (text)")
        try:
            model = small_composite(name) if name in COMPOSITES else small_model(kind)
            logits = model(input_ids=torch.arange(5, 14)[None], use_cache=False).logits
            if not torch.isfinite(logits).all():
                raise ValueError("its random logits are not finite")
            yield kind, model, ""
        except Exception as error:
            yield kind, None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _written(outcomes: Sequence[Outcome]) -> None:
    text = TABLE.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    head = "| Type | Tier | Largest gap | Resumes exactly | All weights | Merges |\n|" + " --- |" * 6
    rows = "\n".join(each.row() for each in sorted(outcomes, key=lambda each: each.kind) if each.is_trained)
    versions = f"transformers {transformers.__version__}, PEFT {peft.__version__}, torch {torch.__version__}"
    table = f"{MARKS[0]}{versions}, fp32 on a CPU:\n\n{head}\n{rows}\n{MARKS[1]}"
    TABLE.write_text(before + table + after, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # these models are too small to share out
    projection.PREPACK_FROM = 1  # as larger matrices are sampled from
    began, outcomes, unmade = time.monotonic(), list[Outcome](), dict[str, str]()
    for kind, model, why in _models(given.kinds):
        if why:
            unmade[kind] = why
            continue
        folder = Path(tempfile.mkdtemp())
        outcomes.append(seen := tried(kind, model, folder))
        shutil.rmtree(folder)
        print(seen.row(), *seen.faults, seen.refused[:160], flush=True)
    trained = [each for each in outcomes if each.is_trained]
    for kind, why in unmade.items():
        print(f"not made small: {kind}: {why[:120]}")
    plain = sum(each.tier == "plain" for each in trained)
    print(f"{len(trained)} types trained, {plain} of them in the tier plain; {time.monotonic() - began:.0f} s")
    refused, faulty = (sum(bool(getattr(each, name)) for each in outcomes) for name in ("refused", "faults"))
    print(f"{refused} refused, {faulty} with a fault")
    if given.write:
        _written(outcomes)
    return int(any(each.faults for each in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
