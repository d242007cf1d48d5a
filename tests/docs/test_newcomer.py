"""Newcomers type README and Try it, line by line, each in an empty folder of an environment that README made."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.docs.clean_environment import OURS, Installed, lend_requirements, make_environment
from tests.docs.command_plan import GIVEN, NEWCOMER, reason_not_run
from tests.docs.reading import FENCE, ROOT, SHELL, typed_in, typed_lines

RUN = ("run.json", "config.toml", "metrics.jsonl", "emergence", "adapter/final", "trainer_state.json")
NAMED = re.compile(r"`(\w+\.py)`")
APART = "## A comparison"  # the rest of README is another newcomer's


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


@dataclass(slots=True, kw_only=True)
class Newcomer:
    """Someone who types what a page, or a part of it, says into one shell, in one folder."""

    installed: Installed
    folder: Path
    page: str
    awaited: dict[str, tuple[tuple[str, ...], tuple[str, ...]]]  # what no newcomer has typed yet
    faults: list[str] = field(default_factory=list)

    def reads(self, text: str) -> list[str]:
        """Type the lines of the text, and write the files that it shows, in its order. Return the faults."""
        self.folder.mkdir()
        for name, content in GIVEN.get(self.page, {}).items():
            (self.folder / name).write_text(content, encoding="utf-8")
        for block in FENCE.finditer(text):
            named = NAMED.findall(text[: block.start()].rstrip().rpartition("\n\n")[2])
            if block["language"] == "python" and named:
                (self.folder / named[-1]).write_text(block["body"], encoding="utf-8")
            for line in typed_in(block["body"]) if block["language"] in SHELL else ():
                if reason_not_run(ROOT / self.page, line) or line in self.installed.typed:
                    continue
                begins = max((each for each in list(self.awaited) if line.startswith(each)), key=len, default="")
                output = self.types(line, *self.awaited.pop(begins, ((), ())))
                if self.page == "README.md" and line == "retrain sums.toml":
                    lines = output.rpartition("Next:\n")[2].splitlines()
                    following = [each.strip() for each in lines if each.startswith("  ")]
                    self.faults += [f"the next commands are {following}"] if len(following) != 3 else []
                    for each in following:
                        self.types(each)
        return self.faults

    def types(self, line: str, files: tuple[str, ...] = (), words: tuple[str, ...] = ()) -> str:
        """Type a line; whatever it does otherwise than the page says is a fault. Its output."""
        done = self.installed.type(line, at=self.folder)
        lacking = [word for word in words if word not in done.stdout]
        lacking += [file for file in files if not list(self.folder.glob(file))]
        if done.returncode or lacking:
            self.faults.append(f"{self.page}: {line}\nexit code {done.returncode}, no {lacking}\n{done.stdout[-3000:]}")
        return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_readme_and_try_it_work_as_typed(tmp_path: Path) -> None:
    """Newcomers share the environment that README's own line installs, and none waits for another.

    The same line fetches everything into an empty environment in `nox -s quickstart` and in the long test of all pages.
    """
    installed, awaited = make_environment(tmp_path), {page: dict(lines) for page, lines in EXPECTED.items()}
    lend_requirements(installed)
    (install,) = [line for line in typed_lines(ROOT / "README.md") if line.startswith("pip install ")]
    installed.must(install)
    installed.typed.add(install)
    first, _, last = (ROOT / "README.md").read_text(encoding="utf-8").partition(f"\n{APART}\n")
    texts = [("README.md", first), ("README.md", last)]
    texts += [(page, (ROOT / page).read_text(encoding="utf-8")) for page in NEWCOMER if page != "README.md"]

    def read(number: int) -> list[str]:
        page, text = texts[number]
        folder = tmp_path / f"empty{number}"
        return Newcomer(installed=installed, folder=folder, page=page, awaited=awaited[page]).reads(text)

    with ThreadPoolExecutor(len(texts)) as newcomers:
        faults = [each for found in newcomers.map(read, range(len(texts))) for each in found]
    faults += [f"{page} has no line that begins with {line!r}" for page, left in awaited.items() for line in left]
    assert installed.distributions() == set(OURS) - {"retrain-tinker", "retrain-prime-rl"}
    assert not faults, f"{len(faults)} faults\n\n" + "\n\n".join(faults)
