"""Units: what a person types (2s, 50ms, key=value) and the error that says what would be accepted."""

from __future__ import annotations

import re

# The same durations as the operator's API takes.
_PART = r"([0-9]{1,5}(?:\.[0-9]{1,3})?)(ms|s|m|h)"
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class InputError(Exception):
    """Something that the user gave is wrong: the message names the flag or file, the value and what would be accepted."""


def seconds(text: str, what: str) -> float:
    """Seconds of a duration such as 2s, 50ms, 1m30s. Raises InputError that names `what`."""
    if not re.fullmatch(f"(?:{_PART}){{1,4}}", text):
        raise InputError(f"{what} {text!r}: accepted is a duration such as 50ms, 2s, 1m30s or 8h")
    return sum(float(number) * _SECONDS[unit] for number, unit in re.findall(_PART, text))


def setting(text: str) -> tuple[str, float | str]:
    """A `key=value` of --set; a value that is a number is one. Raises InputError."""
    key, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", key) or not value:
        raise InputError(f"--set {text!r}: accepted is key=value, such as --set headroom=0.6")
    try:
        return key, float(value)
    except ValueError:
        return key, value
