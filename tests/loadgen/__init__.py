"""AIPerf, a load generator that others use, in a pod: what it sends is a trace of ours, what it saw is its own."""

from loadgen.pod import Generator, Seen, Sent, Summary, running

__all__ = ["Generator", "Seen", "Sent", "Summary", "running"]
