"""Groups: replicas of several pods. The leader serves and stands for the replica; its workers are named after it.

LeaderWorkerSet names the workers of the leader NAME `NAME-1`, `NAME-2`, ... (pkg/controllers/pod_controller.go of LWS 0.9.0: a
StatefulSet of the leader's name whose ordinals begin at 1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from pd_operator.core.observed import ChildFact, WorkloadFact


def whole(leaders: Iterable[str], workers: Iterable[str], size: int) -> int:
    """How many replicas of `size` pods have all of them among these names."""
    of = Counter(name.rpartition("-")[0] for name in workers)
    return sum(of[name] >= size - 1 for name in leaders)


def rolling(new: ChildFact, old: ChildFact) -> ChildFact:
    """A role that goes from one kind of workload to another, seen as one that rolls: with the pods of both, of which the new are
    the updated ones."""
    a, b = new.workload or WorkloadFact(), old.workload or WorkloadFact()
    both = replace(a, replicas=a.replicas + b.replicas, ready=a.ready + b.ready, available=a.available + b.available)
    return replace(new, workload=both)
