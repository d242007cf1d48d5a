"""What a user was told, as codes: sentences may change, codes stay."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from retrain.kernel.errors import RetrainError

_CODE = re.compile(r"(?<=\S )\[([a-z-]+\.[a-z0-9-]+)\]$", re.MULTILINE)  # behind a text; a table stands alone


def codes_in(said: str | RetrainError | pytest.ExceptionInfo[BaseException]) -> list[str]:
    """Return the codes of every problem in an error, in what `pytest.raises` caught, or on a console, in order."""
    error = said.value if isinstance(said, pytest.ExceptionInfo) else said
    return error.codes if isinstance(error, RetrainError) else _CODE.findall(str(error))


def refused(call: Callable[..., object], *args: Any, **named: Any) -> list[str]:
    """Return the codes of the error with which a call ends."""
    with pytest.raises(RetrainError) as caught:
        call(*args, **named)
    return caught.value.codes
