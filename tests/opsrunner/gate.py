"""A queue in miniature: it holds the pods of a slice by a scheduling gate and lets all go once one domain has room."""

from __future__ import annotations

from collections.abc import Sequence

from opsrunner.api import Api, Object
from opsrunner.domains import GPU, Pool
from opsrunner.repeating import Repeating
from pd_operator.core.names import SLICE

GATE = "example.org/admission"


class Queue(Repeating):
    """A context for the pods of one pool of nodes; a slice is admitted when `size` of its pods are there.

    Attributes:
        admitted: slices that were let go.
    """

    def __init__(self, api: Api, pool: Pool, gpus: dict[str, int], size: int) -> None:
        """`gpus`: allocatable accelerators by node of the pool."""
        self._api, self._pool, self._gpus, self._size = api, pool, gpus, size
        self.admitted: list[str] = []

    def look(self) -> None:
        """Let the first slice go that is whole and has room."""
        pods = self._api.list("Pod", self._pool.namespace)
        groups: dict[str, list[Object]] = {}
        for pod in filter(_held, pods):
            groups.setdefault(pod["metadata"]["labels"][SLICE], []).append(pod)
        for name, members in sorted(groups.items()):
            if len(members) >= self._size and self._room(members, pods):
                self._admit(name, members)
                break

    def _room(self, members: Sequence[Object], pods: Sequence[Object]) -> bool:
        """Whether one domain holds all of them, the largest placed first."""
        free = dict(self._gpus)
        for pod in pods:
            if (node := pod["spec"].get("nodeName")) in free:
                free[node] -= _gpus(pod)
        domains = {self._pool.domain(n) for n in free}
        return any(_fits(members, {n: f for n, f in free.items() if self._pool.domain(n) == d}) for d in domains)

    def _admit(self, name: str, members: Sequence[Object]) -> None:
        for pod in members:
            self._api.merge("Pod", self._pool.namespace, pod["metadata"]["name"], {"spec": {"schedulingGates": None}})
        self.admitted.append(name)


def _held(pod: Object) -> bool:
    return {"name": GATE} in (pod["spec"].get("schedulingGates") or []) and not pod["metadata"].get("deletionTimestamp")


def _fits(members: Sequence[Object], free: dict[str, int]) -> bool:
    for pod in sorted(members, key=_gpus, reverse=True):
        node = next((n for n, f in free.items() if f >= _gpus(pod)), None)
        if node is None:
            return False
        free[node] -= _gpus(pod)
    return True


def _gpus(pod: Object) -> int:
    return sum(int(c.get("resources", {}).get("limits", {}).get(GPU, 0)) for c in pod["spec"]["containers"])
