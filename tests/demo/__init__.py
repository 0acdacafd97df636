"""`make demo`: a cluster, the operator from its chart, a PDDeployment, a chat request, and the counters that prove the handoff."""
