"""How the process ends: in good order on SIGTERM, with an error when anything that must run for ever has ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from faults.objects import deployment, service, until
from faults.proxy import FOREVER, Fault, FaultProxy
from faults.runtime import Notes, leading, probe, running, settings
from pd_operator import manager as manager_module
from pd_operator.controller import watch as watch_module
from pd_operator.core.result import Done, Result
from pd_operator.kube.client import KubeClient
from pd_operator.kube.reflector import Timing

pytestmark = pytest.mark.usefixtures("our_kinds")
ROOT = Path(__file__).parents[2]
START = 60.0  # seconds in which a process must be up; imports are slow on a busy machine


class Program:
    """`python -m faults.program` with the lines it printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.output: list[str] = []
        self._reading = [asyncio.create_task(self._read(stream)) for stream in (process.stdout, process.stderr)]

    async def _read(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        async for line in stream:
            self.output.append(line.decode().rstrip())

    def said(self, text: str) -> bool:
        return any(text in line for line in self.output)

    async def expect(self, text: str, seconds: float = START) -> None:
        deadline = time.monotonic() + seconds
        while not self.said(text):
            assert time.monotonic() < deadline and self.process.returncode is None, "\n".join([f"no {text!r} in", *self.output])
            await asyncio.sleep(0.02)

    async def end(self, seconds: float) -> int:
        code = await asyncio.wait_for(self.process.wait(), seconds)
        await asyncio.gather(*self._reading)
        return code


@asynccontextmanager
async def program(kubeconfig: Path, namespace: str, identity: str, **env: str) -> AsyncIterator[Program]:
    """The runtime as a process of its own, killed at the end if it still runs."""
    variables = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT / 'tests'}",
        "TEST_KUBECONFIG": str(kubeconfig),
        "TEST_LEASE": "quick",
        "PD_NAMESPACE": namespace,
        "PD_WATCH_NAMESPACES": namespace,
        "PD_IDENTITY": identity,
        "PD_HTTP_HOST": "127.0.0.1",
        "PD_HTTP_PORT": "0",
        **env,
    }
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "faults.program", env=variables, stdout=pipe, stderr=pipe, limit=2**22
    )
    try:
        yield Program(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def holder(client: KubeClient, namespace: str) -> str:
    found = await client.get("Lease", namespace, "pd-operator")
    return str(found["spec"]["holderIdentity"]) if found else ""


async def test_sigterm_drains_and_releases_and_exits_with_0(client: KubeClient, kubeconfig: Path, namespace: str) -> None:
    await client.create(deployment(namespace))
    async with program(kubeconfig, namespace, "one", TEST_SLEEP="1.5") as one:
        await one.expect("watches are listed")
        await one.expect("leading", 20)
        await one.expect(f"begins {namespace}/chat")
        one.process.send_signal(signal.SIGTERM)
        assert await one.end(12) == 0
        assert one.said(f"reconciled {namespace}/chat")  # the running one was finished
        assert one.said("released lease")
    assert await holder(client, namespace) == ""


async def test_sigterm_cuts_a_reconcile_that_does_not_end(client: KubeClient, kubeconfig: Path, namespace: str) -> None:
    await client.create(deployment(namespace))
    async with program(kubeconfig, namespace, "one", TEST_SLEEP="100") as one:
        await one.expect("watches are listed")
        await one.expect("leading", 20)
        await one.expect(f"begins {namespace}/chat")
        started = time.monotonic()
        one.process.send_signal(signal.SIGTERM)
        assert await one.end(15) == 0
        assert time.monotonic() - started > 5.5
        assert one.said("workers did not end within 6 s and is cut off")
        assert not one.said(f"reconciled {namespace}/chat")
    assert await holder(client, namespace) == ""


async def test_sigterm_ends_a_follower_and_a_process_that_waits_for_its_crds(
    client: KubeClient, kubeconfig: Path, proxy: FaultProxy, namespace: str
) -> None:
    async with program(kubeconfig, namespace, "one") as one:
        await one.expect("leading")
        proxy.add(Fault(path="pdserve.dev", status=404, times=FOREVER))
        async with program(kubeconfig, namespace, "two") as two, program(proxy.kubeconfig, namespace, "three") as three:
            await two.expect("watches are listed")
            await three.expect("custom resource definitions not installed")
            for each in (two, three):
                each.process.send_signal(signal.SIGTERM)
            assert await two.end(10) == 0
            assert await three.end(10) == 0
        assert (await holder(client, namespace)).startswith("one_")


async def test_two_replicas_one_leader_and_a_follower_that_takes_over_with_every_key(
    client: KubeClient, kubeconfig: Path, namespace: str
) -> None:
    for number in range(5):
        await client.create(deployment(namespace, f"d{number}"))
    async with program(kubeconfig, namespace, "one") as one, program(kubeconfig, namespace, "two") as two:
        await one.expect("watches are listed")
        await two.expect("watches are listed")
        await until("one leads", lambda: one.said("leading") or two.said("leading"), 20)
        leader, follower = (one, two) if one.said("leading") else (two, one)
        for number in range(5):
            await leader.expect(f"reconciled {namespace}/d{number}", 20)
        assert not follower.said("reconciled")
        leader.process.kill()  # no release
        await leader.end(10)
        await until("the follower leads", lambda: follower.said("leading"), 25)
        for number in range(5):
            await follower.expect(f"reconciled {namespace}/d{number}", 20)
        await client.merge("PDDeployment", namespace, "d3", {"spec": {"suspend": True}})
        count = sum("d3" in line for line in follower.output)
        await until("and edits are followed", lambda: sum("d3" in line for line in follower.output) > count, 10)


async def test_a_lost_lease_ends_the_process_and_its_writes(
    client: KubeClient, kubeconfig: Path, proxy: FaultProxy, namespace: str
) -> None:
    """The API server is well, only the lease cannot be renewed: another replica may lead, so nothing may be written."""
    await client.create(deployment(namespace))
    notes = Notes(hang_and_write)
    async with running(proxy.kubeconfig, notes, settings(namespace)) as (manager, task):
        hang_and_write.client = notes.client
        await leading(manager)
        await until("a reconcile runs", lambda: notes.calls)
        fault = proxy.add(Fault(path="/leases", drop=True, times=FOREVER))
        await until("the lease is asked for", lambda: fault.used)
        assert await asyncio.wait_for(task, 20) == 1
        assert not manager.elector.is_leader()
    lost = next(n for n, seen in enumerate(proxy.seen) if "/leases" in seen.path and seen.status == 0)
    writes = [seen.path for seen in proxy.seen[lost:] if seen.method != "GET" and "/leases" not in seen.path]
    last = len(writes)
    await asyncio.sleep(1)
    assert len([s for s in proxy.seen[lost:] if s.method != "GET" and "/leases" not in s.path]) == last


class _HangAndWrite:
    """A reconcile that writes for ever."""

    client: KubeClient | None = None

    async def __call__(self, key: tuple[str, str]) -> Result:
        while True:
            await asyncio.sleep(0.1)
            if self.client is not None:
                await self.client.apply(service(key[0], "busy"))


hang_and_write = _HangAndWrite()


async def done(key: tuple[str, str]) -> Result:
    return Done()


@pytest.mark.parametrize(
    ("what", "fault", "says"),
    [
        ("a child's watch forbidden", Fault(path="/services", status=403, times=FOREVER), "watch of Service/"),
        ("a child's list unparsable", Fault(path="/roles", status=200, times=FOREVER), "watch of Role/"),
        ("an error in kopf's watch", Fault(path="pddeployments.*watch", error_after=0, error_code=500), "kopf: WatchingError"),
        ("kopf's list forbidden", Fault(path=r"pdpools$", status=403, times=FOREVER), "kopf: APIForbiddenError"),
        ("kopf's kind gone", Fault(path=r"pdpools$", status=404, times=FOREVER), "kopf: APINotFoundError"),
        ("no right to the lease", Fault(path="/leases", status=403, times=FOREVER), "lease: LeaseUnavailable"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) and ":" not in value else "",
)  # fmt: skip
async def test_a_watch_that_ends_for_good_ends_the_process(
    client: KubeClient, proxy: FaultProxy, namespace: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, what: str, fault: Fault, says: str,
) -> None:  # fmt: skip
    """Better a restart that everybody sees than a live process that is blind."""
    default = watch_module.kopf_settings

    def quick() -> Any:
        made = default()
        made.networking.error_backoffs = (0.1, 0.2)
        made.process.ultimate_exiting_timeout = None  # or it would kill the test run
        return made

    monkeypatch.setattr(watch_module, "kopf_settings", quick)
    proxy.add(fault)
    async with running(proxy.kubeconfig, Notes(), settings(namespace), synced=False) as (_, task):
        assert await asyncio.wait_for(task, 30) == 1, what
    assert any(says in record.getMessage() for record in caplog.records if "exit code 1" in record.getMessage())


async def test_a_process_whose_watch_ended_exits_with_1_and_not_by_force(
    client: KubeClient, proxy: FaultProxy, namespace: str
) -> None:
    """kopf may leave tasks behind that never end; the process must not wait for them, nor be killed by kopf's last resort."""
    proxy.add(Fault(path=r"pdpools$", status=404, times=FOREVER))
    async with program(proxy.kubeconfig, namespace, "one") as one:
        await one.expect("ends with exit code 1: kopf: APINotFoundError")
        started = time.monotonic()
        assert await one.end(10) == 1
        assert time.monotonic() - started < 5


async def test_an_outage_of_the_api_server_ends_the_leader_and_not_the_follower(
    client: KubeClient, proxy: FaultProxy, kubeconfig: Path, namespace: str
) -> None:
    notes = Notes()
    async with running(kubeconfig, Notes(), settings(namespace)) as (leader, _):
        await leading(leader)
        patient = Timing(give_up_after=60, backoff_base=0.05, backoff_cap=0.5)
        async with running(proxy.kubeconfig, notes, settings(namespace), watch=patient) as (follower, task):
            # 4 s: below the 5 s after which a follower that cannot read the lease gives up.
            outage = proxy.add(Fault(path="", drop=True, times=FOREVER))
            await proxy.cut_watches()
            await asyncio.sleep(4)
            outage.times = 0
            assert not task.done()
            leader.stopping.set()
            await leading(follower)
            await client.create(deployment(namespace))
            await until("it works again", lambda: (namespace, "chat") in notes.calls, 20)


async def test_missing_crds_are_named(
    proxy: FaultProxy, client: KubeClient, namespace: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(manager_module, "SERVER_WAIT", 3.0)
    proxy.add(Fault(path="pdpools", status=404, times=FOREVER))
    async with running(proxy.kubeconfig, Notes(), settings(namespace), synced=False) as (_, task):
        assert await asyncio.wait_for(task, 20) == 1
    assert "waited 3 s: custom resource definitions not installed: pdpools.pdserve.dev" in caplog.text


async def test_a_kind_that_cannot_be_listed_is_named(
    proxy: FaultProxy, client: KubeClient, namespace: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(manager_module, "SYNC_WAIT", 3.0)
    proxy.add(Fault(path="/poddisruptionbudgets", delay=60))
    async with running(proxy.kubeconfig, Notes(), settings(namespace), synced=False) as (_, task):
        assert await asyncio.wait_for(task, 20) == 1
    assert f"not listed within 3 s: PodDisruptionBudget/{namespace}" in caplog.text


async def test_a_worker_that_hangs_fails_liveness(client: KubeClient, kubeconfig: Path, namespace: str) -> None:
    await client.create(deployment(namespace))

    async def hang(key: tuple[str, str]) -> Result:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:  # the reconcile's own timeout cannot end it
            await asyncio.sleep(60)
        return Done()

    notes = Notes(hang)
    chosen = settings(namespace, reconcile_timeout_seconds=1)
    async with running(kubeconfig, notes, chosen) as (manager, task):
        await leading(manager)
        await until("it hangs", lambda: notes.calls)
        manager.queue._processing[(namespace, "chat")] -= 40  # 40 s later
        status, body = await probe(manager, "/healthz")
        assert status == 503
        assert body["problems"][0]["check"] == "worker"
        assert body["problems"][0]["limit"] == 31
        task.cancel()


async def test_a_blocked_event_loop_shows_in_the_lag(client: KubeClient, kubeconfig: Path, namespace: str) -> None:
    async with running(kubeconfig, Notes(), settings(namespace, max_loop_lag_seconds=0.5)) as (manager, _):
        await asyncio.sleep(0.1)
        time.sleep(1.5)
        await asyncio.sleep(0.05)
        status, body = await probe(manager, "/healthz")
        assert status == 503
        assert body["problems"][0]["check"] == "loopLag"
        await asyncio.sleep(2)
        assert (await probe(manager, "/healthz"))[0] == 200


async def test_kopf_ends_only_its_own_tasks(client: KubeClient, kubeconfig: Path, namespace: str) -> None:
    """kopf cancels every task that is younger than itself, unless it is told whose they are."""
    async with running(kubeconfig, Notes(done), settings(namespace)) as (manager, task):
        await leading(manager)
        ours = asyncio.create_task(asyncio.sleep(30))
        started = time.monotonic()
        manager.stopping.set()
        assert await asyncio.wait_for(task, 10) == 0
        assert time.monotonic() - started < 5
        assert not ours.done()
        ours.cancel()
