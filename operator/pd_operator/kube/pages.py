"""Pages and watch events of any kind, through a slim model of its objects: bytes in, facts out, and what nobody reads is skipped.

Less CPU than `json.loads` alone, and no garbage of thirty times a fact's size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from pydantic.alias_generators import to_camel

from pd_operator.kube.store import Key

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list."""

    version: str  # resourceVersion of the list
    token: str  # `continue`, "" on the last page
    items: list[tuple[Key, T]]


@dataclass(frozen=True, slots=True)
class Event(Generic[T]):
    """One line of a watch stream. `key` and `item` are None for BOOKMARK and ERROR."""

    type: str  # ADDED | MODIFIED | DELETED | BOOKMARK | ERROR
    version: str
    key: Key | None = None
    item: T | None = None


class Decoder(Protocol[T]):
    """Turns raw bytes of one kind into facts. Raises ValueError for bytes that are not what the API promises."""

    def page(self, raw: bytes) -> Page[T]:
        """Parse one page of a list."""

    def event(self, raw: bytes) -> Event[T]:
        """Parse one line of a watch stream."""


class Slim(BaseModel):
    """A part of an API object; fields that it does not name are skipped."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)


class Meta(Slim):
    """Of an object or a list; a kind adds what it reads."""

    namespace: str = ""
    name: str = ""
    resource_version: str = ""
    continue_: str = Field(default="", alias="continue")
    labels: dict[str, str] = {}


class Thing(Slim):
    """An object; a kind adds what it reads."""

    metadata: Meta = Meta()


R = TypeVar("R", bound=Thing)


class _Page(Slim, Generic[R]):
    metadata: Meta
    items: list[R] | None  # required: a body without it is no list, and must not pass for an empty one


class _Event(Slim, Generic[R]):
    type: str
    object: R


@lru_cache(maxsize=16)
def _adapters(model: type[R]) -> tuple[TypeAdapter[_Page[R]], TypeAdapter[_Event[R]]]:
    return TypeAdapter(_Page[model]), TypeAdapter(_Event[model])  # type: ignore[valid-type]  # pydantic makes these classes now


class SlimDecoder(Generic[R, T]):
    """Decoder of one kind.

    Args:
        model: the slim model of its objects.
        key: under which the store keeps it.
        fact: what is kept of it.
    """

    def __init__(self, model: type[R], key: Callable[[Meta], Key], fact: Callable[[R], T]) -> None:
        self._pages, self._events = _adapters(model)
        self._key, self._fact = key, fact

    def page(self, raw: bytes) -> Page[T]:
        """See Decoder."""
        page = self._pages.validate_json(raw)
        items = [(self._key(item.metadata), self._fact(item)) for item in page.items or ()]
        return Page(page.metadata.resource_version, page.metadata.continue_, items)

    def event(self, raw: bytes) -> Event[T]:
        """See Decoder."""
        event = self._events.validate_json(raw)
        meta = event.object.metadata
        if event.type in {"BOOKMARK", "ERROR"}:
            return Event(event.type, meta.resource_version)
        return Event(event.type, meta.resource_version, self._key(meta), self._fact(event.object))


def by_name(meta: Meta) -> Key:
    """(name,)"""
    return (meta.name,)


def by_namespace(meta: Meta) -> Key:
    """(namespace, name)"""
    return meta.namespace, meta.name
