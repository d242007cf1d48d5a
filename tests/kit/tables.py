"""Cases as text: many short ones to a line, where a list of strings would take a line for each."""

import re


def cells(text: str) -> list[str]:
    """Return the cells of a table; two spaces or the end of a line separate them."""
    return [cell for line in text.strip().splitlines() for cell in re.split(r" {2,}", line.strip())]


def pairs(text: str) -> list[tuple[str, str]]:
    """Return cells of the form `before => after` as pairs; either side may be empty."""
    return [(before.rstrip(), after.lstrip()) for before, _, after in (cell.partition("=>") for cell in cells(text))]
