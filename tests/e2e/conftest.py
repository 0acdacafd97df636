"""Fixtures of the end-to-end tests."""

from served.fixtures import install, served

__all__ = ["install", "served"]
