"""Requests as a user sends them, each judged by what came back and not by its status alone."""

from traffic.answers import Answer, ask
from traffic.load import Load, steady

__all__ = ["Answer", "Load", "ask", "steady"]
