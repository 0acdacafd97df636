"""Loaders of public traces and of a user's own. The folder is an argument or the variable PDD_TRACES."""

from __future__ import annotations

from pathlib import Path

from pd_simulate.workload import Workload

NAMES = ("azure_code", "azure_conv", "mooncake_conversation", "mooncake_synthetic", "servegen_m-small", "servegen_deepseek-r1")


class TraceError(ValueError):
    """A trace that cannot be read; says file, line, field, value and what would be accepted."""


def folder(given: str | Path | None = None) -> Path:
    """Where traces are: the argument, else PDD_TRACES."""
    raise NotImplementedError


def load(name: str, where: str | Path | None = None) -> Workload:
    """A trace by its name in NAMES (ServeGen: one day, at 10 requests/s in the mean), or a path to a CSV or JSONL file."""
    raise NotImplementedError
