"""Small synthetic traces by name, made from a seed: for tests, for the smoke matrix, and for a look without any trace file."""

from __future__ import annotations

from collections.abc import Callable

from pd_simulate.workload import Workload, lengthened, on_off, poisson

SEED = 20261129
LONG = 1800.0  # seconds
# (mean tokens, coefficient of variation). On an 8B model at 8 requests/s they keep two to three replicas of each role busy.
PROMPT, OUTPUT = (8000.0, 0.8), (800.0, 0.8)

_MAKERS: dict[str, Callable[[], Workload]] = {
    # Constant load: a policy must do no harm.
    "steady": lambda: poisson(8.0, LONG, SEED, PROMPT, OUTPUT),
    # The rate triples and falls back every ten minutes.
    "burst": lambda: on_off(12.0, 4.0, 600.0, LONG, SEED + 1, PROMPT, OUTPUT),
    # Outputs are three times as long in the third quarter: D is short, P only looks so.
    "outputs": lambda: lengthened(poisson(8.0, LONG, SEED + 2, PROMPT, OUTPUT), LONG / 2, 0.75 * LONG, output=3.0),
    # Prompts are four times as long in the third quarter: P is short.
    "prompts": lambda: lengthened(poisson(8.0, LONG, SEED + 3, (3000.0, 0.8), OUTPUT), LONG / 2, 0.75 * LONG, prompt=4.0),
}
NAMES = tuple(_MAKERS)


def make(name: str) -> Workload:
    """The trace of this name. Raises KeyError for a name that is not in NAMES."""
    made = _MAKERS[name]()
    return Workload(name, made.arrival, made.prompt, made.output, made.duration)
