"""`kubectl pdd`: looks at PDDeployments. kubectl finds the program `kubectl-pdd` on PATH by its name."""

from pd_operator.plugin.cli import main

__all__ = ["main"]
