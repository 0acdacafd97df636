"""kubectl pdd status: the verdict of each link, what to do about each reason, and the text that a person reads."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import builders
import pytest
from builders import NOW
from plugin_world import SLICE, ago, crashed, event, homeless, pods, seen

from pd_operator import plugin
from pd_operator.api.conditions import REASONS, Reason
from pd_operator.core.verified import OFF
from pd_operator.kube import seen as reading
from pd_operator.kube.read import Unreadable
from pd_operator.kube.seen import Seen
from pd_operator.plugin import terminal
from pd_operator.plugin.chain import EVENTS, PODS, Chain, Link, Verdict, chain
from pd_operator.plugin.next_steps import NOTHING, STEPS, next_steps
from pd_operator.plugin.status_text import text

GOLDEN = builders.ROOT / "tests" / "golden" / "plugin"
UPDATE = os.environ.get("UPDATE_GOLDEN") == "1"
PLAIN, COLOURED = terminal.Paint(False), terminal.Paint(True)
NO_ROOM = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: 0/2 nodes are available."
DARK: dict[str, Any] = {"slices": [{**SLICE, "state": "Dark", "decode": 0}], "servingSlices": 0, "roles": []}
REFUSED = "spec.handoff.onFailure=Fail: Recompute is accepted"
SUSPENDED = ("False", "Suspended", "spec.suspend is true")
HOMELESS = f"pod {homeless().name}: no node for it: {NO_ROOM}"
WORLDS: dict[str, Seen] = {
    "ready": seen(),
    "unschedulable": seen(
        {
            "Placed": ("False", "NoCapacity", NO_ROOM),
            "DecodeReady": ("False", "Unschedulable", f"0 of 1 ready; {HOMELESS}"),
            "RouterReady": ("False", "NotDiscovered", "the router runs and sees no healthy prefill or no healthy decode yet"),
            "Ready": ("False", "Unschedulable", f"DecodeReady: 0 of 1 ready; {HOMELESS}"),
        },
        status=DARK,
        pods=(*(replace(p, ready=p.labels.get("pdserve.dev/role") == "prefill") for p in pods(without=["decode"])), homeless()),
        events=(
            event("Unschedulable", "PDDeployment/chat", f"Ready=False: DecodeReady: 0 of 1 ready; {HOMELESS}", 720),
            event("FailedScheduling", f"Pod/{homeless().name}", NO_ROOM, 725, series={"count": 3, "lastObservedTime": ago(125)}),
        ),
    ),
    "crashing": seen(
        {
            "DecodeReady": ("False", "CrashLoop", f"0 of 1 ready; pod {crashed().name}: container engine ended 5 times"),
            "Ready": ("False", "CrashLoop", f"DecodeReady: 0 of 1 ready; pod {crashed().name}: container engine ended 5 times"),
        },
        pods=(*pods(without=["decode"]), crashed()),
    ),
    "refused": seen(
        {
            "Accepted": ("False", "UnsafeFailurePolicy", REFUSED),
            "Progressing": ("False", "UnsafeFailurePolicy", "nothing is changed until the spec is accepted"),
            "Ready": ("False", "UnsafeFailurePolicy", f"Accepted: {REFUSED} (what served before keeps serving)"),
        }
    ),
    "suspended": seen(
        dict.fromkeys(("Placed", "PrefillReady", "DecodeReady", "Ready"), SUSPENDED)
        | {"Progressing": ("True", "Suspended", "spec.suspend is true"), "RouterReady": ("False", "Starting", "0 of 2 ready")},
        spec={"suspend": True},
        status=DARK,
        pods=(),
    ),
    "nobody": seen(status={"conditions": []}, pods=()),
    "stale": seen(generation=2),
    "operator-down": seen(pods=tuple(replace(p, ready=False) for p in pods())),
    "blind": seen(
        pods=(),
        unread={"pods": "the right to list pods in namespace demo is missing", "events": "TimeoutError"},
        pools={
            "decode": {
                "status": {
                    "conditions": [
                        {
                            "type": "ScalingActive",
                            "status": "False",
                            "reason": "SignalsUnknown",
                            "message": "the number is kept: not known: running; running: podScrape: pod d has no sample for 16 s",
                            "lastTransitionTime": ago(90),
                        }
                    ]
                }
            }
        },
    ),
    "degraded": seen(
        {
            "Degraded": ("True", "PairingNotEnforced", "chat-1a2b3c4d-0: pod d is in rack-2: restore the label of the nodes"),
            "Progressing": ("True", "RollingOut", "chat-9f8e7d6c-0 is being made"),
            "UpdateAvailable": ("True", "RendererChanged", "this version renders differently; set a new rollout.restartID"),
        },
        status={"updatedRevision": "9f8e7d6c"},
    ),
}
# world -> ready, and the verdicts of the links that are not ok
EXPECTED: dict[str, tuple[bool, dict[str, Verdict]]] = {
    "ready": (True, {"handoff": Verdict.UNKNOWN}),
    "unschedulable": (
        False,
        dict.fromkeys(("placement", "decode", "router", "door"), Verdict.NOT) | {"handoff": Verdict.UNKNOWN},
    ),
    "crashing": (False, {"decode": Verdict.NOT, "handoff": Verdict.UNKNOWN}),
    "refused": (False, {"model": Verdict.NOT, "handoff": Verdict.UNKNOWN}),
    "suspended": (
        False,
        dict.fromkeys(("placement", "prefill", "decode", "router", "door"), Verdict.NOT) | {"handoff": Verdict.UNKNOWN},
    ),
    "nobody": (False, {"model": Verdict.UNKNOWN}),
    "stale": (
        False,
        dict.fromkeys(("model", "placement", "prefill", "decode", "router", "handoff"), Verdict.UNKNOWN),
    ),
    "operator-down": (False, dict.fromkeys(("prefill", "decode", "router", "door"), Verdict.NOT) | {"handoff": Verdict.UNKNOWN}),
    "blind": (True, {"handoff": Verdict.UNKNOWN}),
    "degraded": (True, {"handoff": Verdict.UNKNOWN}),
}


@pytest.mark.parametrize("name", WORLDS)
def test_worlds(name: str) -> None:
    found = chain(WORLDS[name])
    ready, verdicts = EXPECTED[name]
    assert found.ready is ready
    assert {x.name: x.verdict for x in found.links if x.verdict is not Verdict.OK} == verdicts
    assert json.loads(json.dumps(found.document()))["ready"] is ready
    shown, path = text(found, PLAIN), GOLDEN / f"status-{name}.txt"
    if UPDATE:
        path.write_text(shown)
    assert path.read_text() == shown, f"{path.name} differs; if that is meant: UPDATE_GOLDEN=1 pytest {__file__}"
    assert re.sub(r"\x1b\[[0-9;]*m", "", text(found, COLOURED)) == shown


def test_no_golden_file_is_left_over() -> None:
    assert {p.stem for p in GOLDEN.glob("status-*.txt")} == {f"status-{name}" for name in WORLDS}


@pytest.mark.parametrize("name", [n for n in WORLDS if not EXPECTED[n][0]])
def test_what_is_not_ready_has_a_next_step(name: str) -> None:
    found = chain(WORLDS[name])
    assert any(link.next for link in found.links)


def step_of(name: str, link: str) -> Link:
    return next(x for x in chain(WORLDS[name]).links if x.name == link)


def test_steps_name_the_pod_and_the_container_at_fault() -> None:
    assert step_of("unschedulable", "decode").next[0] == f"kubectl -n demo describe pod {homeless().name}"
    assert step_of("crashing", "decode").next[0] == f"kubectl -n demo logs {crashed().name} -c engine --previous --tail=50"


def test_what_is_not_proven_because_nobody_may_is_no_wait() -> None:
    waits = chain(seen({"HandoffVerified": ("Unknown", "NotYetRun", "the canary starts when all is ready")})).links[5]
    never = chain(seen({"HandoffVerified": ("Unknown", "NotYetRun", OFF)})).links[5]
    assert (waits.name, never.name) == ("handoff", "handoff") and "canary" in waits.next[0]
    assert never.next == (
        """to have it proven: kubectl -n demo patch pdd chat --type=merge -p '{"spec": {"verification": "Required"}}'""",
    )


def test_long_notes_are_cut() -> None:
    found = chain(seen({"Degraded": ("True", "PairingNotEnforced", "x" * 900)}))
    assert found.notes[0].evidence == "x" * 900 and "x" * 237 + "..." in text(found, PLAIN) and "x" * 238 not in text(found, PLAIN)


KNOWN = {"namespace": "demo", "name": "chat", "pod": "chat-0", "container": "engine"}


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_next_step(reason: Reason) -> None:
    assert STEPS.get(reason) or REASONS[reason].remedy, f"{reason}: neither STEPS nor its remedy says what to do"
    steps = next_steps(reason, KNOWN)
    if NOTHING in STEPS.get(reason, ()):
        assert steps == []
        return
    assert steps
    without_a_pod = next_steps(reason, {k: KNOWN[k] for k in ("namespace", "name")})
    assert without_a_pod or reason in (Reason.CRASH_LOOP,), "a reason that is told without a pod has a step without one"
    for step in steps:
        assert not re.search(r"[{}]", re.sub(r"""'\{.*\}'|-o jsonpath='[^']*'""", "", step)), step
        if "kubectl " in step:
            assert len(shlex.split(step[step.index("kubectl ") :].replace("(kubectl label node ...)", ""))) > 1


def test_every_step_that_is_a_patch_is_json() -> None:
    patches = [m[1] for r in Reason for s in next_steps(r, KNOWN) if (m := re.search(r"-p '(.*)'$", s))]
    assert len(patches) >= 3
    assert all(json.loads(p)["spec"] for p in patches)


def test_a_reason_of_a_newer_operator() -> None:
    assert "does not know Sunburnt" in next_steps("Sunburnt", KNOWN)[0]


def test_long_lists_are_cut() -> None:
    """Those that are not ready come first, and what is left out is counted."""
    many = [replace(pods()[0], name=f"p{n:03}", ready=n != 70) for n in range(PODS + 80)]
    events = tuple(event("Why", f"Pod/p{n}", "because", n) for n in range(30))
    found = chain(seen(pods=(*many, *pods(without=["prefill"])), events=events))
    told = [p.name for p in found.pods if p.part == "prefill"]
    assert len(told) == PODS and told[0] == "p070" and found.pods_untold == 80
    assert "and 80 more pods" in text(found, PLAIN)
    assert [e.object for e in found.events] == [f"Pod/p{n}" for n in range(EVENTS)]


def test_what_is_normal_does_not_hide_a_warning() -> None:
    normal = [event("Scheduled", f"Pod/p{n}", "assigned", n, type="Normal") for n in range(9)]
    found = chain(seen(events=(*normal, event("FailedScheduling", "Pod/q", NO_ROOM, 600))))
    assert [e.object for e in found.events] == ["Pod/p0", "Pod/p1", "Pod/p2", "Pod/p3", "Pod/q"]


def test_a_pod_that_ends_is_not_ready_and_not_to_blame() -> None:
    ending = tuple(replace(p, deleting=True) for p in pods())
    found = chain(seen(pods=(*pods(), *(replace(p, name=f"{p.name}-old") for p in ending))))
    assert found.ready
    assert [p.why for p in found.pods if not p.ready] == ["ends"] * 4


def test_events_of_old_recorders() -> None:
    old = event("Killing", "Pod/x", "n", 0, eventTime=None, deprecatedCount=7, deprecatedLastTimestamp=ago(30))
    (told,) = chain(seen(events=(old,))).events
    assert (told.age, told.count) == (30, 7)


def test_an_object_that_is_deleted() -> None:
    world = seen()
    meta = {**world.deployment["metadata"], "deletionTimestamp": ago(60)}
    found = chain(replace(world, deployment={**world.deployment, "metadata": meta}))
    assert ("deleting", 60) in [(n.name, n.age) for n in found.notes]


# --- the command ----------------------------------------------------------------------------------------------------------


def command(monkeypatch: pytest.MonkeyPatch, answer: Seen | Unreadable, *argv: str) -> int:
    async def see(kubeconfig: str | None, namespace: str | None, name: str) -> Seen:
        if isinstance(answer, Unreadable):
            raise answer
        return answer

    monkeypatch.setattr(reading, "see", see)
    return plugin.main(["status", "chat", *argv])


@pytest.mark.parametrize("name", WORLDS)
def test_exit_codes(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(monkeypatch, WORLDS[name], "-o", "json") == (0 if EXPECTED[name][0] else 1)
    told: Mapping[str, Any] = json.loads(capsys.readouterr().out)
    assert [x["name"] for x in told["links"]][-1] in ("door", "model")


def test_what_cannot_be_read_is_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(monkeypatch, Unreadable("the right to get pddeployments is missing")) == 2
    assert capsys.readouterr().err == "kubectl pdd: the right to get pddeployments is missing\n"


def test_colour_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    class File(Terminal):
        def isatty(self) -> bool:
            return False

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert terminal.paint(Terminal()).on and not terminal.paint(File()).on  # type: ignore[arg-type]
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal.paint(Terminal()).on  # type: ignore[arg-type]
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "dumb")
    assert not terminal.paint(Terminal()).on  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "?"), (-3, "0s"), (0, "0s"), (59, "59s"), (60, "1m"), (95, "1m35s"), (725, "12m"), (3600, "1h"), (12000, "3h20m"),
     (90000, "1d1h"), (86400 * 30, "30d")],
)  # fmt: skip
def test_ages(seconds: float | None, shown: str) -> None:
    assert terminal.age(seconds) == shown


def test_the_chain_is_pure() -> None:
    world = WORLDS["unschedulable"]
    before = json.dumps(world.deployment)
    assert isinstance(chain(world), Chain) and chain(world) == chain(world)
    assert json.dumps(world.deployment) == before
    later = chain(replace(world, now=NOW + timedelta(hours=1)))
    assert later.links[0].age == 7200 + 3600
