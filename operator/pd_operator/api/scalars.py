"""Scalars of the API: patterns, durations, quantities, and the annotations that carry CEL rules from a model into its CRD.

A pattern reaches the CRD as a CEL rule, not as `pattern`: the server then answers "handoff.leaseDuration must be a duration
from 30s to 1h" instead of a regular expression. In a message `{self}` stands for the field's path below spec.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema

# Patterns must mean the same in RE2 (the server) and in Rust's regex (pydantic): ASCII classes only, no \s, \w or \d.
DURATION = r"^([0-9]{1,5}(\.[0-9]{1,3})?(ms|s|m|h)){1,4}$"  # a subset of Go's time.ParseDuration that cannot overflow it
QUANTITY = r"^[0-9]{1,15}(\.[0-9]{1,9})?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$"  # a subset of apimachinery's resource.Quantity, no exponents
IMAGE = r"^[!-~]*$"
IDENTIFIER = r"^[A-Za-z0-9][A-Za-z0-9._/:@+-]*$"
SEMVER = r"^[0-9]{1,6}\.[0-9]{1,6}\.[0-9]{1,6}([.+-]?[0-9A-Za-z][0-9A-Za-z.+-]*)?$"
PERCENT = r"^(100|[1-9]?[0-9])%$"
LABEL_KEY = r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"
HOSTNAME = r"^(\*\.)?[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*$"
INT_OR_STRING: dict[str, Any] = {"x-kubernetes-int-or-string": True}
IntOrString = int | str

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_SUFFIX = {
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate(("", "k", "M", "G", "T", "P", "E"))},
    **{suffix: Decimal(1024) ** power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)},
    **{suffix: Decimal(1000) ** -power for power, suffix in enumerate(("m", "u", "n"), start=1)},
}


class Rule(NamedTuple):
    """A CEL rule and what the user reads when it fails."""

    rule: str
    message: str


def rules(*items: Rule) -> ConfigDict:
    """A model configuration that carries CEL rules into the CRD."""
    return ConfigDict(json_schema_extra={"x-kubernetes-validations": [{"rule": r.rule, "message": r.message} for r in items]})


@dataclass(frozen=True, slots=True)
class Check:
    """Annotation: a CEL rule on the annotated value itself. It replaces the pattern that it contains."""

    rule: str
    message: str

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core)
        if schema.get("pattern", "\0") in self.rule:
            del schema["pattern"]
        schema["x-kubernetes-validations"] = [
            *schema.get("x-kubernetes-validations", []),
            {"rule": self.rule, "message": self.message},
        ]
        return schema


@dataclass(frozen=True, slots=True)
class Says:
    """Annotation: the pattern before it, in words. It replaces the pattern in the CRD."""

    words: str

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core)
        pattern = schema.pop("pattern")
        schema["x-kubernetes-validations"] = [{"rule": f"self.matches(r'{pattern}')", "message": f"{{self}} must be {self.words}"}]
        return schema


def between(low: str, high: str) -> Check:
    """A duration from low to high. Its rule includes the pattern, so that a malformed value gives one message, not two."""
    return Check(
        f"self.matches(r'{DURATION}') && duration(self) >= duration('{low}') && duration(self) <= duration('{high}')",
        f"{{self}} must be a duration from {low} to {high}, made of numbers with the units h, m, s and ms, such as 90s or 1h30m",
    )


@dataclass(frozen=True, slots=True)
class NumberOr:
    """Annotation of `int | str`: an integer from 0 to `maximum`, or a string of `pattern`, in `words`."""

    maximum: int
    pattern: str
    words: str
    max_length: int = 32

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        rule = f"type(self) == int ? self >= 0 && self <= {self.maximum} : self.matches(r'{self.pattern}')"
        return {
            **INT_OR_STRING,
            "maxLength": self.max_length,
            "x-kubernetes-validations": [{"rule": rule, "message": f"{{self}} must be {self.words}"}],
        }

    def check(self, value: int | str) -> int | str:
        """The value itself.

        Raises:
            ValueError: it is neither of the two.
        """
        if isinstance(value, int):
            fits = not isinstance(value, bool) and 0 <= value <= self.maximum
        else:
            fits = len(value) <= self.max_length and re.fullmatch(self.pattern.strip("^$"), value) is not None
        if not fits:
            raise ValueError(f"must be {self.words}")
        return value


_SHARE = NumberOr(10000, PERCENT, "a whole number from 0 to 10000 or a percentage from 0% to 100%", max_length=4)
_AMOUNT = NumberOr(10**15, QUANTITY, "a quantity such as 2, 500m or 16Gi")

Duration = Annotated[str, Field(pattern=DURATION, max_length=32)]  # takes `between` with it
Quantity = Annotated[str, Field(pattern=QUANTITY, max_length=32)]  # takes a Check with it
Share = Annotated[IntOrString, AfterValidator(_SHARE.check), _SHARE]
Amount = Annotated[IntOrString, AfterValidator(_AMOUNT.check), _AMOUNT]
Image = Annotated[
    str, Field(pattern=IMAGE, max_length=512), Says("an image reference without spaces, such as example.org/team/vllm:v0.32.0")
]

T = TypeVar("T")


def unique(values: Sequence[T]) -> Sequence[T]:
    """The values themselves; what listType set and map mean in the CRD. Models are compared by their `name`.

    Raises:
        ValueError: two of them are the same.
    """
    keys: list[Hashable] = [getattr(value, "name", value) for value in values]
    if len(set(keys)) != len(keys):
        raise ValueError("must not contain the same entry twice")
    return values


def to_camel(name: str) -> str:
    """snake_case to camelCase."""
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)


def seconds(duration: str) -> float:
    """Seconds of a duration such as "1m30s".

    Raises:
        ValueError: not a duration.
    """
    if not re.fullmatch(DURATION.strip("^$"), duration):
        raise ValueError(f"{duration!r} is not a duration such as 30s, 2m or 1h30m")
    return sum(float(n) * _UNITS[unit] for n, _, unit in re.findall(r"([0-9]+(\.[0-9]+)?)(ms|s|m|h)", duration))


def ceil_seconds(duration: str) -> int:
    """Whole seconds that cover a duration."""
    return math.ceil(seconds(duration) - 1e-9)


def quantity(value: int | float | str) -> Decimal:
    """The number that a Kubernetes quantity stands for ("20Gi" -> 21474836480).

    Raises:
        ValueError: not a quantity.
    """
    match = re.fullmatch(r"([+-]?[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)([numkMGTPE]?|[KMGTPE]i)", str(value).strip())
    if not match:
        raise ValueError(f"{value!r} is not a quantity such as 500m, 2 or 16Gi")
    return Decimal(match[1]) * _SUFFIX[match[2]]


def format_bytes(value: Decimal) -> str:
    """A byte count as the canonical quantity, rounded up to whole MiB ("21474836480" -> "20Gi")."""
    mib = int((value / _SUFFIX["Mi"]).to_integral_value(rounding=ROUND_CEILING))
    return f"{mib // 1024}Gi" if mib % 1024 == 0 else f"{mib}Mi"
