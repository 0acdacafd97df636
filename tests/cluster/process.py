"""Processes of one cluster: started with a log file and a record on disk, found again after a crash, ended by pid only.

Every process carries the variable PDD_CLUSTER_STATE=<state folder> in its environment. Children that it forks inherit it, so a
later command finds them all in /proc, also those whose start was cut off before the record was written.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cluster.progress import wait_for

MARK = "PDD_CLUSTER_STATE"


def start_ticks(pid: int) -> int | None:
    """When the process began (clock ticks since boot, field 22 of /proc/PID/stat), None when it is gone or a zombie.

    A pid together with this number names one process for good, whatever the kernel does with the pid later.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def marked(state: Path) -> list[int]:
    """The pids of all live processes that carry this state folder's mark, our own excepted."""
    needle = f"{MARK}={state}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if needle in environment + b"\0" and start_ticks(int(entry.name)) is not None:
            found.append(int(entry.name))
    return found


def end(pids: Sequence[int], *, grace: float, what: str) -> None:
    """SIGTERM, then after `grace` seconds SIGKILL, to exactly these pids. Raises TimeoutError when one outlives SIGKILL by 10 s."""
    alive = {pid: ticks for pid in pids if (ticks := start_ticks(pid)) is not None}

    def left() -> list[int]:
        _reap(alive)
        return [pid for pid, ticks in alive.items() if start_ticks(pid) == ticks]

    def send(number: signal.Signals) -> None:
        for pid in left():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    if grace > 0:
        send(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while left() and time.monotonic() < deadline:
            time.sleep(0.05)
    send(signal.SIGKILL)
    wait_for(f"the end of {what}", lambda: not left() or f"wait: pids {left()}", timeout=10, interval=0.05)


def _reap(pids: Mapping[int, int]) -> None:
    # Children of this very process stay zombies until somebody waits for them; others answer ECHILD.
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue


@dataclass
class Processes:
    """The processes of one cluster. `die_with_parent`: the kernel ends them when the starting thread dies (for pytest)."""

    state: Path
    die_with_parent: bool = False
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def log(self, name: str) -> Path:
        return self.state / "logs" / f"{name}.log"

    def start(self, name: str, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None) -> int:
        """Start a process; its output is appended to the log file. Returns the pid."""
        log = self.log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [str(part) for part in argv]
        if self.die_with_parent:
            command = ["setpriv", "--pdeathsig", "SIGKILL", "--", *command]
        environment = {**os.environ, **(env or {}), MARK: str(self.state)}
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True, cwd="/"
            )
        self._running[name] = process
        record = self.state / "pids" / f"{name}.json"
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps({"pid": process.pid, "start": start_ticks(process.pid), "argv": command}))
        return process.pid

    def recorded(self) -> dict[str, int | None]:
        """Name -> pid of every recorded process; None for one that is no longer alive."""
        result: dict[str, int | None] = {}
        for record in sorted((self.state / "pids").glob("*.json")):
            try:
                entry = json.loads(record.read_text())
            except ValueError:  # cut off while it was written
                continue
            alive = entry["start"] is not None and start_ticks(entry["pid"]) == entry["start"]
            result[record.stem] = entry["pid"] if alive else None
        return result

    def check(self, name: str) -> None:
        """Raises RuntimeError with the end of its log when the process has ended."""
        process = self._running.get(name)
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"{name} ended with code {process.returncode}; the end of {self.log(name)}:\n{self.tail(name)}")

    def tail(self, name: str, lines: int = 15) -> str:
        log = self.log(name)
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.is_file() else "(no log)"

    def stop(self, name: str, *, grace: float = 3.0) -> None:
        """End one process (SIGTERM, after `grace` seconds SIGKILL) and forget it."""
        pid = self.recorded().get(name)
        if pid is not None:
            end([pid], grace=grace, what=name)
        process = self._running.pop(name, None)
        if process is not None:
            process.wait(timeout=10)
        (self.state / "pids" / f"{name}.json").unlink(missing_ok=True)

    def stop_all(self, *, grace: float = 0.0) -> None:
        """End every process of the cluster that carries its mark, recorded or not, until none is left (at most 5 rounds)."""
        for _ in range(5):
            pids = marked(self.state)
            if not pids:
                break
            end(pids, grace=grace, what=f"the processes of {self.state.name}")
        else:
            raise RuntimeError(f"processes of {self.state} keep coming back: {marked(self.state)}")
        for process in self._running.values():
            process.wait(timeout=10)
        self._running.clear()
        for record in (self.state / "pids").glob("*.json"):
            record.unlink()
