"""Real engines for the tests: vLLM on CPU, LMCache and NIXL with a tiny model made on the spot."""

from real.runtime import Runtime, ensure

__all__ = ["Runtime", "ensure"]
