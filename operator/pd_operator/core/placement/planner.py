"""place(demand, view): how many prefill and decode replicas each transfer domain gets, and why. Pure and deterministic."""

from __future__ import annotations

from typing import Final

from pd_operator.core.placement.demand import Demand
from pd_operator.core.placement.index import Capacity
from pd_operator.core.placement.result import Placement

CONSOLIDATION: Final = 2  # replicas that may be moved to use one domain less: one pair


def place(demand: Demand, view: Capacity) -> Placement:
    """Decide over one demand."""
    raise NotImplementedError
