"""Decisions as pure functions of a snapshot: no IO, no clock, no logging."""
