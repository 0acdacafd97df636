"""The plugin kubectl-pdd as a person uses it: called with a kubeconfig, or found by kubectl on PATH."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from cluster.tools import tool
from pd_operator import plugin


class Pdd:
    """The plugin, called as a person of this kubeconfig."""

    def __init__(self, kubeconfig: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.kubeconfig, self._capsys = kubeconfig, capsys

    def __call__(self, *argv: str) -> tuple[int, str, str]:
        """(exit code, output, errors)."""
        self._capsys.readouterr()
        code = plugin.main([*argv, "--kubeconfig", str(self.kubeconfig)])
        printed = self._capsys.readouterr()
        return code, printed.out, printed.err

    async def later(self, *argv: str) -> tuple[int, str, str]:
        """The same beside a running event loop."""
        return await asyncio.to_thread(self, *argv)


def environment(kubeconfig: Path) -> dict[str, str]:
    """kubectl and kubectl-pdd on PATH."""
    path = f"{tool('kubectl').parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "KUBECONFIG": str(kubeconfig)}
