"""README and Try it, typed line by line in their order, in one clean environment and one empty folder.

Environment variables, which Try it documents, shorten runs and the campaign; command_plan.py says which lines
are not typed here, and why.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.docs.clean_environment import OURS, Installed, make_environment
from tests.docs.command_plan import GIVEN, NEWCOMER, reason_not_run
from tests.docs.reading import FENCE, ROOT, SHELL, typed_in

RUN = ("run.json", "config.toml", "metrics.jsonl", "emergence", "adapter/final", "trainer_state.json")
NAMED = re.compile(r"`(\w+\.py)`")


# What the page says that a line brings about: files, and words of its output.
EXPECTED: dict[str, dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "README.md": {
        "retrain init --model builtin:tiny --data tasks.jsonl": (("sums.toml",), ("held out",)),
        "retrain explain sums.toml": ((), ("log_dir", "sums.toml:")),
        "retrain sums.toml": (tuple(f"logs/tasks/{name}" for name in RUN), ("Eval before training", "Held-out: ")),
        "retrain trace --transform-mode my_transforms.make_transform_spec": ((), ("entropy_shift",)),
        "retrain init-plugin --kind": (("plugins/entropy_floor.py", "tests/test_entropy_floor_plugin.py"), ()),
        "retrain init-plugin --distribution": (("my-transform/pyproject.toml", "my-transform/tests"), ()),
        "retrain plugins": ((), ("gtpo_sepa", "retrain-sepa")),
        "retrain init --template campaign-tiny": (("logs/campaign_*/manifest.json",), ("4 of 4 runs done",)),
        "retrain compare": ((), ("2 conditions",)),
        "retrain report": (("logs/campaign_*/report.html",), ()),
    },
    "docs/pages/try-it.md": {
        "retrain init --template tiny": (("first.toml",), ()),
        "retrain first.toml": (("logs/tiny/metrics.jsonl",), ("Step 0 [maxrl+gtpo_sepa]",)),
        "retrain credit logs/tiny": (("credit.html",), ()),
        "retrain --resume logs/tiny --max-steps": ((), ("Resuming logs/tiny at step 3", "Training complete.")),
        "retrain init --template quickstart": (("real.toml",), ()),
        "retrain explain real.toml": ((), ("peak_memory",)),
        "retrain first.toml --seed 42": ((), ("Seed 42",)),
    },
}


@dataclass(slots=True)
class Newcomer:
    """Someone who types what the pages say into one shell, in one folder."""

    installed: Installed
    folder: Path
    faults: list[str] = field(default_factory=list)

    def reads(self, page: str) -> None:
        """Type the lines of a page, and write the files that it shows, in the order of the page."""
        awaited, text = dict(EXPECTED[page]), (ROOT / page).read_text(encoding="utf-8")
        for name, content in GIVEN.get(page, {}).items():
            (self.folder / name).write_text(content, encoding="utf-8")
        for block in FENCE.finditer(text):
            named = NAMED.findall(text[: block.start()].rstrip().rpartition("\n\n")[2])
            if block["language"] == "python" and named:
                (self.folder / named[-1]).write_text(block["body"], encoding="utf-8")
            for line in typed_in(block["body"]) if block["language"] in SHELL else ():
                if reason_not_run(ROOT / page, line) or line in self.installed.typed:
                    continue
                begins = max((each for each in awaited if line.startswith(each)), key=len, default="")
                output = self.types(page, line, *awaited.pop(begins, ((), ())))
                if page == "README.md" and line == "retrain sums.toml":
                    lines = output.rpartition("Next:\n")[2].splitlines()
                    following = [each.strip() for each in lines if each.startswith("  ")]
                    self.faults += [f"the next commands are {following}"] if len(following) != 3 else []
                    for each in following:
                        self.types(page, each)
        self.faults += [f"{page} has no line that begins with {line!r}" for line in awaited]

    def types(self, page: str, line: str, files: tuple[str, ...] = (), words: tuple[str, ...] = ()) -> str:
        """Type a line; whatever it does otherwise than the page says is a fault. Its output."""
        done = self.installed.type(line, at=self.folder)
        if line.startswith(("pip ", "python3 ")):
            self.installed.typed.add(line)  # another page need not install the same again
        lacking = [word for word in words if word not in done.stdout]
        lacking += [file for file in files if not list(self.folder.glob(file))]
        if done.returncode or lacking:
            self.faults.append(f"{page}: {line}\nexit code {done.returncode}, no {lacking}\n{done.stdout[-3000:]}")
        return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_readme_and_try_it_work_as_typed(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    installed = make_environment(tmp_path)
    newcomer = Newcomer(installed, folder)
    for page in NEWCOMER:
        newcomer.reads(page)
    assert installed.distributions() == set(OURS) - {"retrain-tinker", "retrain-prime-rl"}
    assert not newcomer.faults, f"{len(newcomer.faults)} faults\n\n" + "\n\n".join(newcomer.faults)
