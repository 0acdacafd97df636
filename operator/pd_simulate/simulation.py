"""simulate(): one workload, one fleet, one policy, one seed -> one Result."""

from __future__ import annotations

from pd_simulate.fleet import Fleet
from pd_simulate.result import Result
from pd_simulate.view import Policy
from pd_simulate.workload import Workload


def simulate(workload: Workload, fleet: Fleet, policy: Policy, seed: int, audit: bool = False) -> Result:
    """Run to the end of the workload and until its requests have ended (bounded by `fleet.horizon`).

    The policy is called every `policy.tick` seconds from time 0. Its answer is clamped here to minimum, maximum and budget
    (the larger rise is trimmed first); clamps are counted. `seed` moves lead times, scrape losses and which replicas fail:
    the workload is seeded where it is made, so that policies can be compared on common random numbers.
    `audit` checks every conservation rule after every event (slow) and raises AssertionError with the rule's name.
    """
    raise NotImplementedError
