"""Passive evidence: what the counters of the pods say of handoff and offload while they serve. Pure."""
