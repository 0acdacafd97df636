"""One spec as the checks of compatibility see it, and what a check says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pd_operator.api.types import PDDeploymentSpec
from pd_operator.core.capabilities import Rule, Upstream
from pd_operator.core.compatibility_model import Model
from pd_operator.core.compatibility_options import Options


@dataclass(frozen=True, slots=True)
class Case:
    """What is judged: the spec, the options that each engine gets, and the model when its config.json was given."""

    spec: PDDeploymentSpec
    upstream: Upstream
    images: Mapping[str, str]
    model: Model | None
    prefill: Options
    decode: Options

    @property
    def roles(self) -> tuple[Options, Options]:
        """Both roles, prefill first."""
        return self.prefill, self.decode

    @property
    def tensor(self) -> tuple[int, int]:
        """Tensor parallel sizes of prefill and decode."""
        return self.spec.prefill.parallelism.tensor, self.spec.decode.parallelism.tensor

    @property
    def recurrent(self) -> str:
        """Names of the model's recurrent states; "" when it has none or is not known."""
        return " and ".join(self.model.recurrent) if self.model else ""


@dataclass(frozen=True, slots=True)
class Finding:
    """A check that does not hold."""

    field: str
    value: str
    having: str  # what it is set against: "prefill has 4"; "" when the value alone is wrong
    accepted: str  # what would be accepted, as a clause
    unproven: bool = False  # not refused: too little is known


Predicate = Callable[[Case, Rule], Iterator[Finding]]


def whole(options: Options, names: tuple[str, ...], default: int = 1) -> int:
    """A flag's whole number, or what the engine takes without it."""
    return options.number(*names) or default


def listed(numbers: list[int]) -> str:
    """[1, 2, 4] -> "1, 2 or 4"."""
    texts = [str(n) for n in numbers]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
