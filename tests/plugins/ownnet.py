"""A pytest plugin: each xdist worker but the first gets a network namespace of its own. Load it with `-p plugins.ownnet`.

The real nodes of two clusters want the same bridges, addresses and rules (network.py); nothing outside is reached from in there.
"""

from __future__ import annotations

import ctypes
import os
import subprocess

import pytest

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of sched.h; os.unshare comes with Python 3.12


def pytest_configure(config: pytest.Config) -> None:
    """Leave the network of the others before anything of the session listens."""
    if getattr(config, "workerinput", {}).get("workerid", "gw0") == "gw0":
        return
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        number = ctypes.get_errno()
        raise OSError(number, f"a network namespace for this worker: {os.strerror(number)}")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=10)
