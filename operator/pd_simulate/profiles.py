"""Step-time profiles: fitted coefficients that ship with the package, and fits of a table of one's own."""

from __future__ import annotations

from pd_simulate.view import Profile


def names() -> tuple[str, ...]:
    """Profiles that ship."""
    raise NotImplementedError


def get(name: str) -> Profile:
    """A shipped profile, e.g. `L8B-H200-TP1` (Llama-3.1-8B on one H200)."""
    raise NotImplementedError
