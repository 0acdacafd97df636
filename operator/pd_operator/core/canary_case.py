"""What a canary is told to do: written into its Job by the operator, read back by the program in the pod."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict

VARIABLE: Final = "PDD_CANARY"  # environment variable of the pod that holds a Case as JSON
KEY_VARIABLE: Final = "PDD_CANARY_API_KEY"  # and the engines' API key, where they have one
REQUESTS: Final = 3  # through the Service: rounding may turn one answer of three, not two
MOST_REQUESTS: Final = 8  # of one canary, to whomever: REQUESTS through the Service, as many to one engine, one more for the cache
BUDGET: Final = 240.0  # seconds for everything; the first request of a pair took 31 s on a starved machine (measured)
DEADLINE: Final = 300  # seconds, of the Job: the program ends by itself before


class Engine(BaseModel):
    """One ready engine pod."""

    model_config = ConfigDict(frozen=True)

    pod: str
    url: str  # http://10.0.0.7:8000
    cache: str = ""  # of its LMCache server's HTTP port; "" without one


class Case(BaseModel):
    """One run."""

    model_config = ConfigDict(frozen=True)

    mark: str  # pdd-canary-<slice>-<number>: the request ids begin with it
    url: str  # of the slice's own Service
    model: str  # what clients ask for
    engine: str  # program and version, for the names of its counters
    engine_version: str
    router: str
    router_version: str = ""
    cache_version: str = ""
    chunk: int = 0  # tokens of a chunk of LMCache; 0 without it
    p2p: bool = False  # LMCache servers of the slice find each other through its coordinator
    dark: bool = True  # nobody else uses these engines
    prefill: tuple[Engine, ...]
    decode: tuple[Engine, ...]
    routers: tuple[str, ...] = ()  # URLs of their metrics
