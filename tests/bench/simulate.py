"""python -m bench.simulate: CPU time of the simulator with our law, at 15,000, 30,000 and 60,000 requests.

The baseline is the same load with a policy that never changes a pool, in the same run: what is above it is the law's. The cost of
a request at 60,000 against that at 15,000 says whether it grows with requests alone.
"""

from __future__ import annotations

import sys
import time

from pd_simulate.fleet import Fleet
from pd_simulate.policies.registry import Inputs, entry
from pd_simulate.policies.static import Static
from pd_simulate.profiles import get
from pd_simulate.simulation import simulate
from pd_simulate.synthetic import OUTPUT, PROMPT, SEED
from pd_simulate.view import Policy
from pd_simulate.workload import poisson

PROFILE = "L8B-H200-TP1"
RATE = 8.0  # requests a second; two to three replicas of each role are busy
COUNTS = (15_000, 30_000, 60_000)
BUDGET_S = 60.0  # for the largest
LINEAR = 1.25  # a request may cost so many times what it costs at the smallest count


def seconds(count: int, policy: Policy) -> tuple[float, int]:
    """(CPU seconds, events) of one run."""
    load = poisson(RATE, count / RATE, SEED, PROMPT, OUTPUT)
    settings = Fleet(get(PROFILE), 3, 3, budget=16)
    begin = time.process_time()
    events = simulate(load, settings, policy, seed=1).events
    return time.process_time() - begin, events


def main() -> int:
    """Print the table; 1 when the largest is slower than `BUDGET_S` or a request costs more there."""
    each = []
    print(f"{'requests':>10} {'events':>10} {'CPU':>8} {'ms a request':>13} {'fixed pools':>12} {'ratio':>6}")
    for count in COUNTS:
        taken, events = seconds(count, entry("ours").build(Inputs(get(PROFILE), 16)))
        base, _ = seconds(count, Static(3, 3, "fixed"))
        each.append(taken / count)
        print(f"{count:10,} {events:10,} {taken:7.1f}s {1000 * taken / count:13.3f} {base:11.1f}s {taken / base:6.2f}")
    growth = each[-1] / each[0]
    print(f"budget {BUDGET_S:.0f} s for {COUNTS[-1]:,} requests; a request costs {growth:.2f} times what it costs at {COUNTS[0]:,}")
    return 0 if COUNTS[-1] * each[-1] <= BUDGET_S and growth <= LINEAR else 1


if __name__ == "__main__":
    sys.exit(main())
