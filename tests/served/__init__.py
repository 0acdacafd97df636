"""One PDDeployment on a real cluster, handled as a user does: apply, wait, ask, look at counters."""

from served.served import Served, chat

__all__ = ["Served", "chat"]
