"""What the reflectors saw last: objects by key, and by the PDDeployment they belong to.

One store may be fed by several reflectors (one per kind and namespace); each owns a *scope* and replaces only that, so a
fresh list of one kind removes what disappeared of it and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pd_operator.core.ledger import Ledger
from pd_operator.core.names import DEPLOYMENT
from pd_operator.core.observed import AutoscalerFact, ChildFact, PodFact

T = TypeVar("T")
Key = tuple[str, ...]  # (namespace, name) or (kind, namespace, name)
Owner = tuple[str, str]  # (namespace, name) of a PDDeployment
Change = tuple[T | None, T | None]  # old, new
REMEMBERED = 4096  # removed objects that are kept in mind


class Store(Generic[T]):
    """Objects by key with an index by owner. Not thread-safe: one event loop reads and writes it.

    Attributes:
        generation: grows with every change; equal generations mean equal contents.
    """

    def __init__(self, owner_of: Callable[[T], Owner | None]) -> None:
        self._owner_of = owner_of
        self._items: dict[Key, T] = {}
        self._scopes: dict[Hashable, set[Key]] = {}
        self._owners: dict[Owner, set[Key]] = {}
        self._ordered: dict[Owner, tuple[T, ...]] = {}  # of owners that were asked for since their last change
        self._removed: OrderedDict[Key, T] = OrderedDict()
        self.generation = 0

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._items.values()))

    def get(self, *key: str) -> T | None:
        """The object under `key`, its parts as arguments."""
        return self._items.get(key)

    def removed(self, *key: str) -> T | None:
        """What was removed last under `key`, as long as nothing is there again and it is not long ago.

        Tells "deleted" from "not shown yet" after a write of our own.
        """
        return self._removed.get(key)

    def by_owner(self, namespace: str, name: str) -> tuple[T, ...]:
        """All objects of one PDDeployment, in the order of their keys: the same tuple until one of them changes, so that what was
        made of it can be kept as long."""
        owner = (namespace, name)
        if owner not in self._owners:
            return ()
        found = self._ordered.get(owner)
        if found is None:
            found = self._ordered[owner] = tuple(self._items[key] for key in sorted(self._owners[owner]))
        return found

    def owners(self) -> set[Owner]:
        """All PDDeployments that own something here, whether or not they still exist."""
        return set(self._owners)

    def put(self, scope: Hashable, key: Key, item: T) -> T | None:
        """Add or replace; returns what was there."""
        old = self._items.get(key)
        if old is not None:
            self._unindex(key, old)
        self._items[key] = item
        self._removed.pop(key, None)
        self._scopes.setdefault(scope, set()).add(key)
        owner = self._owner_of(item)
        if owner is not None:
            self._owners.setdefault(owner, set()).add(key)
            self._ordered.pop(owner, None)
        self.generation += 1
        return old

    def remove(self, scope: Hashable, key: Key) -> T | None:
        """Remove; returns what was there."""
        old = self._items.pop(key, None)
        self._scopes.get(scope, set()).discard(key)
        if old is not None:
            self._unindex(key, old)
            self._removed[key] = old
            if len(self._removed) > REMEMBERED:
                self._removed.popitem(last=False)
            self.generation += 1
        return old

    def replace(self, scope: Hashable, items: Mapping[Key, T]) -> list[Change[T]]:
        """Make `items` the whole contents of `scope`; returns what changed, deletions as (old, None).

        Deletions that happened while nobody watched are seen here and only here.
        """
        gone = [key for key in self._scopes.get(scope, ()) if key not in items]
        changes: list[Change[T]] = [(self.remove(scope, key), None) for key in gone]
        for key, item in items.items():
            old = self._items.get(key)
            if old != item:
                changes.append((self.put(scope, key, item), item))
        return changes

    def _unindex(self, key: Key, item: T) -> None:
        owner = self._owner_of(item)
        if owner is None:
            return
        self._ordered.pop(owner, None)
        keys = self._owners.get(owner, set())
        keys.discard(key)
        if not keys:
            self._owners.pop(owner, None)


def owner_of(item: ChildFact | PodFact) -> Owner | None:
    """The PDDeployment an object belongs to: its label, in its own namespace."""
    name = item.labels.get(DEPLOYMENT)
    return (item.namespace, name) if name else None


@dataclass(slots=True)
class Stores:
    """All that reconciles read without asking the API server.

    Attributes:
        children: every kind we apply, by (kind, namespace, name).
        pods: by (namespace, name).
        autoscalers: HPAs of all people by (namespace, name); their owner is what they scale, (namespace, its name).
        deployments: keys of the PDDeployments that existed at the last list or event; a hint for the periodic resync, never
            a reason to delete anything.
        read: resourceVersion of each PDDeployment as the last look at it read it: an event that shows no other one is no news.
        ledger: capacity of the nodes; None where this install must not read them.
        absent: optional kinds that cannot be observed, by (kind, namespace of the watch), and why.
    """

    children: Store[ChildFact] = field(default_factory=lambda: Store[ChildFact](owner_of))
    pods: Store[PodFact] = field(default_factory=lambda: Store[PodFact](owner_of))
    autoscalers: Store[AutoscalerFact] = field(default_factory=lambda: Store[AutoscalerFact](lambda a: (a.namespace, a.target)))
    deployments: set[Owner] = field(default_factory=set)
    read: dict[Owner, str] = field(default_factory=dict)
    ledger: Ledger | None = None
    absent: dict[tuple[str, str | None], str] = field(default_factory=dict)

    def missing_kinds(self, namespace: str) -> dict[str, str]:
        """Optional kinds that nothing can be made of in a namespace, and why."""
        return {kind: why for (kind, scope), why in self.absent.items() if scope in (None, namespace)}
