"""Signals: what the pods of PDDeployments say of their load, from their /metrics or from Prometheus, behind one protocol."""
