"""What the programs that we run can do, as values: `upstream/` fills them, `core/` reads them and imports no upstream."""

from __future__ import annotations

from dataclasses import dataclass

from pd_operator.api.conditions import Reason


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a spec is not accepted. Invariant I8: field, value and what would be accepted."""

    reason: Reason
    field: str  # spec.engine.version
    value: str
    accepted: str  # a sentence: "0.26.0 or later with lmcache"

    @property
    def message(self) -> str:
        """One line for the user."""
        shown = f"{self.field}={self.value}" if self.value else self.field
        return f"{shown}: {self.accepted}"


@dataclass(frozen=True, slots=True)
class Program:
    """An engine, a router or a cache server at the version that the spec names."""

    name: str
    version: str
    proven: bool  # this version went through our real tests
    owned_flags: frozenset[str] = frozenset()
    owned_env: frozenset[str] = frozenset()
    forbidden_flags: tuple[tuple[str, str], ...] = ()  # (flag, what to use instead)


@dataclass(frozen=True, slots=True)
class Upstream:
    """The programs of one PDDeployment, and the rules that need several of them at once."""

    engine: Program
    router: Program
    lmcache: Program | None
    refusals: tuple[Refusal, ...] = ()  # version rules already judged by upstream/
