"""Intake: the door of a D replica: what waits for it, what it pulls, and the seats and KV that it sets aside."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pd_simulate.replica import Replica
from pd_simulate.request import OPEN, Phase, Request

if TYPE_CHECKING:
    from pd_simulate.serving import Serving

# Share of KV that stays free when a request is admitted (vLLM's block manager keeps a watermark of 1 %).
WATERMARK = 0.01


class Intake(Replica):
    """First come, first served: the head of the queue waits for a seat and for KV. DecodeEngine adds the steps."""

    __slots__ = (
        "_joining",
        "chunk_tokens",
        "committed",
        "context",
        "convertible",
        "kv_capacity",
        "local_tokens",
        "prefills",
        "reserve",
        "running",
        "seats",
        "serving",
        "transit",
        "waiting",
        "waiting_count",
        "waiting_tokens",
    )

    def __init__(self, serving: Serving, name: str, slice_index: int) -> None:
        super().__init__(serving.clock, name, "decode", slice_index)
        fleet = serving.fleet
        self.serving = serving
        self.kv_capacity = fleet.profile.kv_capacity
        self.reserve = fleet.growth == "reserve"
        self.seats = fleet.profile.max_num_seqs
        if fleet.admission.enabled and fleet.admission.running_per_decode:
            self.seats = min(self.seats, fleet.admission.running_per_decode)
        self.chunk_tokens = fleet.mixed_tokens
        self.convertible = False
        self.running: dict[Request, None] = {}  # in order of joining
        self.context = 0  # tokens of the running ones
        self.committed = 0  # KV set aside beyond that: pulls, local prefills, output reserved
        self.waiting: deque[Request] = deque()  # handed over, or to be prefilled here; not reserved
        self.waiting_count = 0
        self.waiting_tokens = 0  # KV tokens they need
        self.local_tokens = 0  # prompt tokens to prefill here, waiting ones included
        self.transit: dict[Request, None] = {}  # being pulled
        self.prefills: deque[Request] = deque()
        self._joining: list[Request] = []

    def _soon(self) -> None:
        """The batch is to change at the next step's end."""
        raise NotImplementedError

    def leave(self, request: Request) -> None:
        """A request in the batch has ended early."""
        raise NotImplementedError

    @property
    def load(self) -> int:
        """Requests on it in whatever state."""
        return len(self.running) + self.waiting_count + len(self.transit) + len(self.prefills) + len(self._joining)

    @property
    def seated(self) -> int:
        """Requests that have a seat and KV: running, pulled, joining or prefilled here."""
        return len(self.running) + len(self.transit) + len(self.prefills) + len(self._joining)

    @property
    def kv_used(self) -> int:
        """KV tokens in use or set aside, as of the last batch change."""
        return self.context + self.committed

    @property
    def empty(self) -> bool:
        """Nothing running, waiting or on its way."""
        return self.load == 0 and self.active_since < 0

    def joining(self) -> tuple[Request, ...]:
        """Pulled, and in the batch from the next step on."""
        return tuple(self._joining)

    def offer(self, request: Request) -> None:
        """A request to decode: its KV stands on P, or (`request.local`) it must be prefilled here."""
        request.decode = self
        request.phase = Phase.HANDOFF
        self._queue(request, front=False)
        self.admit()

    def _queue(self, request: Request, front: bool) -> None:
        if front:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)
        self.waiting_count += 1
        self.waiting_tokens += request.prompt + request.generated
        if request.local:
            self.local_tokens += request.left

    def make_local(self, request: Request) -> None:
        """The KV of a waiting request is gone: it is to be prefilled here."""
        request.local = True
        request.left = request.prompt + request.generated
        request.context = 0
        self.local_tokens += request.left
        self.admit()

    def drop_waiting(self, request: Request) -> None:
        """A waiting request has ended or goes elsewhere; it leaves the queue when its turn comes."""
        self.waiting_count -= 1
        self.waiting_tokens -= request.prompt + request.generated
        if request.local:
            self.local_tokens -= request.left

    def admit(self) -> None:
        """Reserve KV and a seat for waiting requests in order, and pull (or prefill) them."""
        waiting = self.waiting
        if not waiting:
            return
        limit = self.kv_capacity - int(WATERMARK * self.kv_capacity)
        while waiting:
            request = waiting[0]
            if request.outcome != OPEN or request.phase != Phase.HANDOFF or request.decode is not self:
                waiting.popleft()
                continue
            need = request.prompt + (request.output if self.reserve else request.generated)
            used = self.context + self.committed
            if self.seated >= self.seats or (used + need > limit and not (used == 0 and need <= self.kv_capacity)):
                break
            if request.local and sum(one.left for one in self.prefills) >= self.chunk_tokens:
                break
            waiting.popleft()
            self.waiting_count -= 1
            self.waiting_tokens -= request.prompt + request.generated
            request.reserved = need
            self.committed += need
            if request.local:
                request.phase = Phase.LOCAL
                self.prefills.append(request)
                self.serving.reserved(request)
                self._soon()
            else:
                request.phase = Phase.TRANSFER
                self.transit[request] = None
                self.serving.reserved(request)

    def pulled(self, request: Request) -> None:
        """The transfer has ended: it joins at the next step (or its KV is freed, if it has ended meanwhile)."""
        del self.transit[request]
        if request.outcome != OPEN:
            self._free(request)
            self.admit()
            return
        request.phase = Phase.JOINING
        self._joining.append(request)
        self._soon()

    def abort_transit(self, request: Request) -> None:
        """A pull that will not end: free what was set aside for it."""
        del self.transit[request]
        self._free(request)

    def forget_transit(self, request: Request) -> None:
        """Its P is gone in mid-transfer: back to the queue's head, to be prefilled here."""
        self.abort_transit(request)
        request.phase = Phase.HANDOFF
        self._queue(request, front=True)
        self.make_local(request)

    def _free(self, request: Request) -> None:
        self.committed -= request.reserved
        request.reserved = 0
