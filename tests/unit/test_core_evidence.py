"""Passive evidence: what accuses, what does not, what clears, and what is proven."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from evidence_world import BEGIN, SLICE, TICK, Page, World

from pd_operator.api.conditions import Reason
from pd_operator.api.status import HandoffStatus
from pd_operator.core.evidence import told
from pd_operator.core.evidence.finding import MAX_SENTENCE, read
from pd_operator.core.evidence.watch import Evidence, contradiction, offload_contradiction, restore


def test_ordinary_load_accuses_nobody_and_proves_every_replica() -> None:
    world = World()
    for _ in range(40):
        world.serve(20)
        world.tick()
    assert world.turned == [] and world.evidence.verified == {"prefill": 2, "decode": 2} and world.evidence.unverified == ()
    totals = world.evidence.totals
    assert (totals["transfers"], totals["fallbacks"], totals["expired"]) == (780, 0, 0)  # what a first page shows came before


def silent(world: World) -> None:
    for pod in ("d0", "d1"):
        world.fall_back(pod, 5)


def one_silent(world: World) -> None:
    world.serve(5, decodes=["d1"])
    world.fall_back("d0", 5)


def failing(world: World) -> None:
    world.serve(10, decodes=["d1"])
    world.fall_back("d0", 4, failed=True)


def failing_and_expiring(world: World) -> None:
    failing(world)
    world.page("p0").add(expired=4)  # what was not fetched expires


def half_failing(world: World) -> None:
    world.serve(10)
    world.fall_back("d0", 3, failed=True)


def expiring(world: World) -> None:
    world.serve(10)
    world.page("p0").add(expired=2)


def read_late(world: World) -> None:
    world.serve(10)
    world.page("p0").add(expired=2, read_late=2)


def errors(world: World) -> None:
    world.page("d0").add(bad_answers=5)


def stuck(world: World) -> None:
    world.page("d0").values |= {"fetching": 7.0, "running": 0.0}


def server_down(world: World) -> None:
    world.serve(10)
    world.page("p0", "cache").failure = "Connection refused"


CASES: dict[str, tuple[Callable[[World], None], str, str, list[str]]] = {
    "silent": (silent, "SilentFallback", SLICE, ["decode computed", "prompts itself", "smg.ai/kv-connector", "pod d"]),
    "one silent": (one_silent, "ReplicaNotTransferring", "d0", ["decode pod d0: no transfer since", "delete the pod"]),
    "failing": (failing, "ReplicaNotTransferring", "d0", ["decode pod d0", "transfers from prefill failed", "logs d0 -c engine"]),
    "failing and expiring": (failing_and_expiring, "ReplicaNotTransferring", "d0", ["decode pod d0"]),
    "half failing": (half_failing, "ReplicaNotTransferring", "d0", ["decode pod d0"]),
    "expiring": (expiring, "LeaseExpired", "p0", ["prefill pod p0", "ended before decode took them", "handoff.leaseDuration"]),
    "read late": (read_late, "LeaseExpired", "p0", ["may be wrong"]),
    "errors": (errors, "BrokenPath", "d0", ["decode pod d0", "all answered with a server error"]),
    "stuck": (stuck, "BrokenPath", SLICE, ["nothing runs there since", "lease of 30s"]),
    "server down": (server_down, "CacheDown", "p0", ["LMCache server does not answer", "Connection refused", "-c lmcache"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_cause_has_its_reason_its_sentence_and_an_end(case: str) -> None:
    fault, reason, subject, words = CASES[case]
    world = World(cache=True)
    for _ in range(10):
        world.serve(20)
        world.tick()
    assert world.turned == []
    for _ in range(20):
        fault(world)
        world.tick()
    assert world.turned and world.turned[0][1] == (reason,) and len(world.turned) == 1, world.turned
    (found,) = world.evidence.findings
    assert (found.reason.value, found.subject, found.slice) == (reason, subject, SLICE)
    for word in words:
        assert word in found.sentence, found.sentence
    longest = "x" * (63 if subject != SLICE else 41)
    assert "Next: " in found.sentence and len(found.sentence.replace(subject, longest)) <= MAX_SENTENCE, "what to do is not cut off"
    assert 10 * TICK <= found.since - BEGIN <= 12 * TICK  # the first sign
    for page in world.pages:
        page.failure, page.values["fetching"] = "", 0.0
    for _ in range(20):
        world.serve(20)
        world.tick()
    assert [reasons for _, reasons in world.turned] == [(reason,), ()], world.turned


def no_answer(world: World, requests: float) -> None:
    """Requests that a router with an open circuit refuses by itself."""
    world.page("r0").add(offered=requests, failed=requests)


def test_an_engine_that_its_router_has_stopped_asking_is_named() -> None:
    """smg opens its circuit after ten errors and asks again once a minute: the counters of the engine hardly move any more."""
    world = World(decode=1)
    world.pages.append(Page("r0", "router", values={"failed": 0.0}))
    for _ in range(10):
        world.serve(20)
        world.tick()
    world.serve(10)  # in the same step: a page is read every 15 s
    world.page("d0").add(bad_answers=11)
    for _ in range(3):
        no_answer(world, 20)
        world.tick()
    (found,) = world.evidence.findings
    assert (found.reason, found.subject) == (Reason.BROKEN_PATH, "d0") and "routers refuse" in found.sentence
    assert contradiction(world.evidence, SLICE, 0.0) == found
    for _ in range(20):
        no_answer(world, 20)
        world.tick()
    assert world.reasons() == ["BrokenPath"], "nothing is well yet"
    for _ in range(4):
        world.serve(20)
        world.tick()
    assert world.reasons() == []


@pytest.mark.parametrize("others", [0, 20])
def test_one_error_a_minute_is_enough_where_every_request_fails(others: float) -> None:
    """The circuit had opened before the operator looked: what smg tries once a minute is all that the engine sees."""
    world = World(decode=1)
    world.pages.append(Page("r0", "router", values={"failed": 0.0}))
    for n in range(12):
        if n % 4 == 1:
            world.page("d0").add(bad_answers=1)
        no_answer(world, 20)
        world.page("r0").add(offered=others)
        world.tick()
    assert world.reasons() == ([] if others else ["BrokenPath"])


@pytest.mark.parametrize("restarted", [True, False])
def test_errors_of_an_engine_that_ended_say_nothing_of_the_next(restarted: bool) -> None:
    """It died with ten errors; the one that came after it is ready, and its router has not found it yet."""
    world = World(decode=1)
    world.pages.append(Page("r0", "router", values={"failed": 0.0}))
    for _ in range(4):
        world.serve(20)
        world.tick()
    world.page("d0").add(bad_answers=10)
    world.tick()
    if restarted:
        world.page("d0").reset()
    for _ in range(6):
        no_answer(world, 20)
        world.tick()
    assert world.reasons() == ([] if restarted else ["BrokenPath"])


def test_errors_that_are_over_accuse_nobody() -> None:
    """Five errors at once, then nobody asks."""
    world = World(decode=1)
    world.pages.append(Page("r0", "router", values={"failed": 0.0}))
    world.serve(20)
    world.tick()
    world.serve(10)
    world.page("d0").add(bad_answers=8)
    no_answer(world, 8)
    world.tick(10)
    assert world.turned == []


@pytest.mark.parametrize("case", ["silent", "one silent", "failing", "errors"])
def test_silence_clears_nothing_and_accuses_nobody(case: str) -> None:
    world = World()
    for _ in range(4):
        world.serve(20)
        world.tick()
    world.tick(40)
    assert world.turned == []
    for _ in range(6):
        CASES[case][0](world)
        world.tick()
    world.tick(100)  # nobody asks
    assert [reasons for _, reasons in world.turned] == [(CASES[case][1],)]
    assert world.evidence.unverified  # what is accused counts as proven no more


@pytest.mark.parametrize("case", ["silent", "failing", "expiring", "errors", "server down"])
def test_once_is_no_cause(case: str) -> None:
    """What a restart or a deletion cuts, fails or lets expire is over within a tick or two."""
    world = World(cache=True)
    for n in range(60):
        world.serve(20)
        for page in world.pages:
            page.failure = ""
        if n % 20 == 5:
            CASES[case][0](world)
        world.tick()
    assert world.turned == []


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("ticks", range(3, 16))
def test_leases_that_expire_because_transfers_failed_accuse_no_prefill(ticks: int, replaced: bool) -> None:
    """They end a lease later, and so for two ticks after the transfers work again, or after the pod that failed them is gone."""
    world = World(prefill=1, decode=1)
    for tick in range(40):
        broken = 10 <= tick < 10 + ticks
        if replaced and tick == 10 + ticks:
            world.pages = [p for p in world.pages if p.pod != "d0"] + [Page("d1", "decode")]
        world.serve(0 if broken else 10)
        if broken:
            world.fall_back("d0", 10, failed=True)
        ended = 12 + ticks + replaced  # of the pod that is gone nobody saw the last failures
        world.page("p0").add(expired=10 if 12 <= tick < ended else 0, **({"ended": 10, "computed": 5000} if broken else {}))
        world.tick()
    assert {reason for _, reasons in world.turned for reason in reasons} <= {"ReplicaNotTransferring"}, world.turned
    assert world.reasons() == []


@pytest.mark.parametrize(
    "series", ["prompts", "computed", "received", "transfers", "failed_transfers", "expired", "bad_answers", "fetching"]
)
def test_what_is_not_known_neither_accuses_nor_clears_nor_proves(series: str) -> None:
    accuses = {"prompts": silent, "computed": silent, "received": silent, "transfers": failing,
               "failed_transfers": failing, "expired": expiring, "bad_answers": errors, "fetching": stuck}[series]  # fmt: skip
    world = World()
    for page in world.pages:
        page.absent = frozenset({series})
    for _ in range(20):
        accuses(world)
        world.tick()
    assert world.turned == []
    if series == "transfers":
        assert world.evidence.verified["decode"] == 0
    world = World()
    for _ in range(10):
        accuses(world)
        world.tick()
    reasons = world.reasons()
    assert reasons
    for page in world.pages:
        page.absent = frozenset({series})
    world.page("d0").values["fetching"] = 0.0
    for _ in range(3):
        world.serve(20)
        world.tick()
    if series not in ("bad_answers", "fetching"):  # other counters show those two mended
        assert world.reasons() == reasons


def test_a_restart_of_the_process_is_no_growth_below_zero_and_no_gap() -> None:
    world = World()
    for n in range(20):
        world.serve(20)
        if n == 10:
            for page in world.pages:
                page.reset()
        world.tick()
    assert world.turned == [] and world.evidence.totals["transfers"] == 360  # those of the restart's own tick are lost


def test_a_fallback_is_no_transfer() -> None:
    world = World()
    for _ in range(10):
        world.fall_back("d0", 7)
        world.fall_back("d1", 3, failed=True)
        world.tick()
    totals = world.evidence.totals
    assert totals["transfers"] == 0 and totals["transferred_bytes"] == 0
    assert totals["fallbacks"] == 90 and totals["failed_transfers"] == 27
    assert world.evidence.verified == {"prefill": 0, "decode": 0} and world.evidence.last_verified is None


def test_one_fallback_among_many_prompts_is_counted() -> None:
    """500 tokens computed beside 120 prompts that came: less than what each prompt of a Mamba model may compute again."""
    world = World()
    for n in range(4):
        world.serve(240)
        if n == 2:
            world.fall_back("d0", 1)
        world.tick()
    assert world.evidence.totals["fallbacks"] == pytest.approx(1.0, abs=0.01) and world.turned == []


def test_the_last_tokens_that_every_prompt_computes_again_are_no_fallback() -> None:
    world = World()
    for _ in range(10):
        world.serve(240)
        for pod in ("d0", "d1"):
            world.page(pod, "decode").add(computed=120 * 9)
        world.tick()
    assert world.evidence.totals["fallbacks"] == 0 and world.turned == []


def test_a_prefill_is_proven_only_by_transfers_that_no_other_could_have_fed() -> None:
    world = World()
    for _ in range(20):  # p0 works, p1 hands nothing over
        world.serve(10, prefills=["p0"])
        world.page("p1").add(computed=5000, prompts=10, ended=10)
        world.fall_back("d0", 10)
        world.tick()
    assert world.evidence.verified["prefill"] == 0
    for _ in range(30):  # p1 gets nothing any more
        world.serve(10, prefills=["p0"])
        world.tick()
    assert world.evidence.verified == {"prefill": 1, "decode": 2} and world.evidence.unverified == ("p1",)


def test_a_pair_that_is_lost_for_longer_than_a_replacement_takes() -> None:
    world = World(1, 1)
    world.tick(4)
    world.page("d0").ready = False
    world.tick(4)
    assert world.turned == []  # replacing the only one takes a while
    world.tick(1)
    (found,) = world.evidence.findings
    assert (
        found.reason is Reason.PAIR_LOST and "no ready decode replica since" in found.sentence and "DecodeReady" in found.sentence
    )
    world.page("d0").ready = True
    world.tick()
    assert world.reasons() == []


def test_a_slice_that_never_was_a_pair_has_not_lost_it() -> None:
    world = World(1, 1)
    world.page("d0").ready = False
    world.tick(40)
    assert world.turned == []


def test_a_replica_that_goes_takes_its_finding_along() -> None:
    world = World()
    for _ in range(8):
        failing(world)
        world.tick()
    assert world.reasons() == ["ReplicaNotTransferring"]
    world.pages = [p for p in world.pages if p.pod != "d0"] + [Page("d2", "decode")]
    world.serve(20)
    world.tick()
    assert world.reasons() == []


def test_restart_of_the_operator() -> None:
    """What status told stands until counters say otherwise; totals never fall, and prefill stays proven."""
    world = World()
    for _ in range(20):
        world.serve(20)
        world.fall_back("d0", 6, failed=True)
        world.tick()
    before = world.evidence
    assert before.findings and before.verified["prefill"] == 2
    status = {
        "handoff": told.handoff(before, {}),
        "roles": [{"name": "prefill", "verifiedReplicas": 2}, {"name": "decode", "verifiedReplicas": 0}],
    }
    assert HandoffStatus.model_validate(status["handoff"]).model_dump(by_alias=True, exclude_unset=True) == status["handoff"]
    assert told.degraded(None, status).reason == before.findings[0].reason.value  # before the first look
    world.record, world.turned = restore(status), []
    world.tick()
    assert [f.key for f in world.evidence.findings] == [f.key for f in before.findings]
    assert world.evidence.totals["fallbacks"] == before.totals["fallbacks"] == 114
    assert world.evidence.verified["prefill"] == 2
    world.pages = [p for p in world.pages if p.pod != "d0"] + [Page("d2", "decode")]  # its counts go with it
    world.record = restore(status)
    for _ in range(4):
        world.serve(20)
        world.tick()
    assert world.evidence.totals["fallbacks"] == 114 and world.reasons() == []


def test_status_is_not_written_anew_for_a_count_that_moves_little() -> None:
    first = told.handoff(Evidence(0.0, totals={"fallbacks": 100.0}, last_verified=BEGIN), {})
    assert first == {"fallbackRequests": 100, "expired": 0, "lastVerified": "2027-01-15T08:00:00Z"}
    assert told.handoff(Evidence(0.0, totals={"fallbacks": 2.97}), {})["fallbackRequests"] == 3  # an estimate: the nearest count
    kept = told.handoff(Evidence(0.0, totals={"fallbacks": 109.0}, last_verified=BEGIN + 599), {"handoff": first})
    assert kept == first
    moved = told.handoff(Evidence(0.0, totals={"fallbacks": 111.0}, last_verified=BEGIN + 600), {"handoff": first})
    assert moved == {"fallbackRequests": 111, "expired": 0, "lastVerified": "2027-01-15T08:10:00Z"}
    assert told.handoff(None, {"handoff": first}) == first


def test_what_contradicts_a_proof() -> None:
    world = World()
    for _ in range(10):
        silent(world)
        world.tick()
    (found,) = world.evidence.findings
    assert contradiction(world.evidence, SLICE, found.since - 1) == found
    assert contradiction(world.evidence, SLICE, found.since + 1) is None  # proven after it
    assert contradiction(world.evidence, "other", 0.0) is None and contradiction(None, SLICE, 0.0) is None
    world = World()
    for _ in range(10):
        failing(world)
        world.tick()
    assert (
        world.reasons() == ["ReplicaNotTransferring"] and contradiction(world.evidence, SLICE, 0.0) is None
    )  # the other one works
    for _ in range(10):
        world.fall_back("d0", 4, failed=True)
        world.fall_back("d1", 4, failed=True)
        world.tick()
    against = contradiction(world.evidence, SLICE, 0.0)
    assert against is not None and against.reason is Reason.REPLICA_NOT_TRANSFERRING
    world = World()
    for _ in range(10):
        expiring(world)
        world.tick()
    assert world.reasons() == ["LeaseExpired"] and contradiction(world.evidence, SLICE, 0.0) is None


def test_what_contradicts_a_proof_of_offload() -> None:
    world = World(cache=True)
    for page in world.pages:
        page.pod = f"{SLICE}-{page.pod}"
    mine, other = f"{SLICE}-p0", f"{SLICE}-p1"

    def ask(*stored: float) -> None:  # lookups without stores: the missing real-blocks fix
        world.serve(20)
        for pod, chunks in zip((mine, other), stored, strict=True):
            world.page(pod, "cache").add(lookups=2, requested=512, stored=chunks)
        world.tick()

    for _ in range(10):
        ask(0, 2)
    (found,) = world.evidence.findings
    assert (found.reason, found.subject) == (Reason.NOT_SUBMITTING, mine) and "Next: kubectl logs" in found.sentence
    assert len(found.sentence.replace(mine, "x" * 63)) <= MAX_SENTENCE
    assert offload_contradiction(world.evidence, SLICE, 0.0) is None, "the other one stores"
    for _ in range(10):
        ask(0, 0)
    against = offload_contradiction(world.evidence, SLICE, 0.0)
    assert against is not None and against.reason is Reason.NOT_SUBMITTING and against.subject == mine
    assert offload_contradiction(world.evidence, SLICE, world.now) is None  # proven after it
    assert offload_contradiction(world.evidence, "other", 0.0) is None and offload_contradiction(None, SLICE, 0.0) is None
    assert contradiction(world.evidence, SLICE, 0.0) is None, "it hands over all the same"
    world.tick(6)
    assert offload_contradiction(world.evidence, SLICE, 0.0) is not None, "silence takes nothing back"
    ask(2, 0)
    assert [f.subject for f in world.evidence.findings] == [other]
    assert offload_contradiction(world.evidence, SLICE, 0.0) is None
    world.page(mine, "cache").failure = "Connection refused"
    world.tick(6)
    against = offload_contradiction(world.evidence, SLICE, 0.0)
    assert against is not None and against.reason is Reason.CACHE_DOWN and against.subject == mine


def test_a_coordinator_that_stays_away_has_a_name() -> None:
    world = World(cache=True)

    def live(ready: bool | None, ticks: int) -> None:
        for _ in range(ticks):
            world.serve(20)
            for page in world.of("cache"):
                page.add(lookups=2, requested=512, stored=2)
            world.tick(site=replace(world.site(), coordinators={} if ready is None else {SLICE: ready}))

    live(False, 8)
    assert world.reasons() == [], "it was never there: the canary's to tell"
    live(True, 2)
    live(False, 3)
    live(True, 1)
    live(False, 4)
    assert world.reasons() == [], "it was made again"
    live(False, 1)
    (found,) = world.evidence.findings
    assert (found.reason, found.subject, found.slice) == (Reason.CACHE_DOWN, f"{SLICE}-coordinator", SLICE)
    assert "no ready pod" in found.sentence and "Next: kubectl describe pods -l" in found.sentence
    assert offload_contradiction(world.evidence, SLICE, 0.0) is None, "each server stores"
    world.record = restore({"handoff": told.handoff(world.evidence, {})})
    live(False, 1)
    assert world.reasons() == ["CacheDown"], "a restart of the operator forgets nothing"
    live(True, 1)
    assert world.reasons() == []
    live(False, 6)
    live(None, 1)
    assert world.reasons() == [], "P2P was switched off"


def test_findings_that_are_no_findings_are_left_out() -> None:
    good = {"reason": "CacheDown", "subject": "p0", "slice": SLICE, "since": "2027-01-15T08:00:00Z", "message": "m"}
    bad = [{}, {**good, "reason": "Gone"}, {**good, "since": "yesterday"}, {**good, "subject": ""}]
    assert [f.subject for f in read({"findings": [good, *bad]})] == ["p0"] and read({}) == ()


@pytest.mark.parametrize("seed", range(12))
def test_an_hour_of_ordinary_life_accuses_nobody(seed: int) -> None:
    """Load with restarts, deletions, scale-ups, engines and servers that come back, cut transfers and clients that leave."""
    dice = random.Random(seed)
    world = World(3, 3, cache=True)
    world.pages.append(Page("r0", "router", values={"failed": 0.0}))
    late: dict[str, float] = {}  # chunks that are stored a tick after the lookup
    dying: list[Page] = []
    back: list[tuple[int, Page]] = []
    quiet = 0  # three pods that go within a minute are a cause; here one goes at a time
    for n in range(240):
        requests = dice.choice([0, 5, 40])
        world.serve(requests)
        for cache in world.of("cache"):
            if not cache.failure:
                cache.add(lookups=requests, requested=256.0 * requests, hit=128.0 * requests, stored=late.pop(cache.pod, 0.0))
                late[cache.pod] = float(requests)
        for page in dying:
            page.reset()
        dying = []
        world.page("p0").add(expired=float(dice.random() < 0.02))
        due = [page for at, page in back if at <= n]
        back = [(at, page) for at, page in back if at > n]
        for page in due:
            page.ready, page.failure, page.running = True, "", True
        if dice.random() < 0.2 and n >= quiet:  # a pod is replaced: what was under way fails, and its leases end
            quiet = n + 4
            victim = dice.choice([p for p in world.pages if p.side in ("prefill", "decode")])
            mine = [p for p in world.pages if p.pod == victim.pod]
            for other in world.of("decode"):
                world.fall_back(other.pod, dice.randint(0, 8), failed=True)
            world.of("prefill")[0].add(expired=dice.randint(0, 12))
            for page in mine:
                page.uid = f"{page.uid}+"
                page.reset()
                page.ready, page.failure, page.running = False, "never", False
                back.append((n + dice.randint(1, 3), page))
        if dice.random() < 0.1:  # an engine answers with errors until it ends, and is started again in its place
            dying = [dice.choice([*world.of("prefill"), *world.of("decode")])]
            dying[0].add(bad_answers=dice.randint(0, 20))
        if dice.random() < 0.2:  # requests that no engine could be found for
            world.page("r0").add(failed=dice.randint(0, 40))
        if dice.random() < 0.05:  # a container is restarted in its place
            page = dice.choice(world.of("cache"))
            page.reset()
            page.failure, page.running = "Connection refused", False
            back.append((n + 1, page))
        world.tick()
    assert world.turned == []
