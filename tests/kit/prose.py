"""Count the words, comments and tics of the sources and pages: `python -m tests.kit.prose [-v]` prints them.

A tic is an expression that reads as if translated. `nox -s lint` fails when there are more than `TICS_IN_SOURCES`;
`-v` prints each one with its place.
"""

import argparse
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
TICS_IN_SOURCES = 120
TICS = {
    "what as a noun": r"\bwhat (?:an?|the|is|are|was|were|it|they|its|this|that|has|have|one|each|every|no|[a-z]+s)\b",
    "opening with What, Whether, Where, How": r"(?:^\W*|[.:]\s+)(?:What|Whether|Where|How)\b(?![^.\n]*\?)",
    "trailing which": r", which\b",
    "that of": r"\b(?:that|those) of\b",
    "is none": r"\b(?:is|are|has|have|had|was|were) none\b",
    "alone for only": r"\balone\b",
    "as it was": r"\bas (?:it|they) (?:was|were|is|are|stands?)\b|\bas far as\b",
    "asked": r"\basks?\b|\basked\b",
    "of its own": r"\bof (?:its|their|our|his|one's) own\b",
    "bare else": r"(?:[,;:] |\bor |\band )else\b(?! if)",
    "told": r"\b(?:told|tells?)\b",
    "stands": r"\bstands?\b",
    "elsewhere": r"\b(?:elsewhere|theirs|ours|strangers?)\b",
    "beside": r"\b[Bb]esides?\b",
    "goes on": r"\b(?:goes|go|went|going) on\b",
    "somebody": r"\b(?:[Ss]ome|[Nn]o|[Aa]ny)body\b",
    "anew": r"\banew\b",
    "see as a docstring": r"\"\"\"See `[^`]*`\.?\"\"\"",
}


def tics(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each tic in one line of prose, and the words that are it."""
    for name, expression in TICS.items():
        yield from ((name, match[0].strip()) for match in re.finditer(expression, text))


def prose_of(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a page, or of the strings and comments of a module."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        yield from enumerate(text.splitlines(), start=1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            yield from enumerate(token.string.splitlines(), start=token.start[0])


def is_comment(line: str) -> bool:
    """True for a comment of its own line or behind code, without directives to tools."""
    return bool(re.search(r"(?:^|\s)#\s(?!type:|noqa|pragma)", line))


def modules(*folders: str) -> list[Path]:
    """Return the modules below these folders of the repository."""
    return sorted(file for folder in folders for file in ROOT.glob(f"{folder}/**/*.py"))


def pages() -> list[Path]:
    """Return the pages that are written by hand; the reference is generated."""
    found = [*ROOT.glob("docs/pages/**/*.md"), *ROOT.glob("*.md"), *ROOT.glob("retrain-*/README.md")]
    return sorted([*found, *ROOT.glob("retrain-core/src/**/manual.md")])


def _comment_lines(files: Sequence[Path]) -> int:
    texts = (io.StringIO(file.read_text(encoding="utf-8")) for file in files)
    tokens = (token for text in texts for token in tokenize.generate_tokens(text.readline))
    return sum(token.type == tokenize.COMMENT and is_comment(token.string) for token in tokens)


def _num_lines(files: Sequence[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def main(arguments: Sequence[str]) -> int:
    """Print the counts; return 1 when the sources have too many tics."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-v", "--verbose", action="store_true", help="print every tic with its place")
    is_verbose = parser.parse_args(arguments).verbose
    sources, tests = modules("retrain-*/src"), modules("tests")
    found: dict[str, Counter[str]] = {}
    for where, files in (("sources", sources), ("pages", pages())):
        found[where] = Counter()
        for file in files:
            for number, line in prose_of(file):
                for name, words in tics(line):
                    found[where][name] += 1
                    if is_verbose:
                        print(f"{file.relative_to(ROOT)}:{number}: [{words}] {line.strip()[:100]}")
    num_lines, num_comments = _num_lines(sources), _comment_lines(sources)
    print(f"{'tic':<40} sources  pages")
    for name in TICS:
        print(f"{name:<40} {found['sources'][name]:7}  {found['pages'][name]:5}")
    print(f"{'in all':<40} {found['sources'].total():7}  {found['pages'].total():5}")
    print(f"words on {len(pages())} pages: {sum(len(page.read_text(encoding='utf-8').split()) for page in pages())}")
    print(f"modules {len(sources)}, lines {num_lines}, comments {num_comments} ({num_comments / num_lines:.1%})")
    print(f"lines of tests {_num_lines(tests)} in {len(tests)} modules")
    if found["sources"].total() > TICS_IN_SOURCES:
        print(f"more than {TICS_IN_SOURCES} tics in the sources; -v shows them", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
