"""Snapshot + plan -> manifests. Pure and deterministic."""
