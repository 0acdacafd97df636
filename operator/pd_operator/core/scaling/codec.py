"""Codec: frozen dataclasses to plain JSON values and back, exactly, so that a decision can be recorded and replayed."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Dataclasses, tuples, enums and dicts as JSON values. Fields that hold their default are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(v) for f in dataclasses.fields(value) if (v := getattr(value, f.name)) != _default(f)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [encode(v) for v in value]
    if isinstance(value, dict):
        return {str(k): encode(v) for k, v in value.items()}
    return value


def decode(kind: type[T], data: Any) -> T:
    """The dataclass `kind` from `encode`'s value. Raises ValueError that names the field where the value does not fit."""
    return typing.cast(T, _decode(kind, data, kind.__name__))


def dumps(value: Any) -> str:
    """One line of JSON, keys sorted: the same value always gives the same bytes. Raises ValueError on NaN and infinities."""
    return json.dumps(encode(value), sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def loads(kind: type[T], text: str) -> T:
    """The dataclass `kind` from one line of `dumps`."""
    return decode(kind, json.loads(text))


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else dataclasses.MISSING


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _decode(kind: Any, data: Any, path: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        inner = [k for k in typing.get_args(kind) if k is not type(None)]
        return None if data is None else _decode(inner[0], data, path)
    if origin is tuple:
        return _tuple(typing.get_args(kind), data, path)
    if origin is dict:
        value_kind = typing.get_args(kind)[1]
        return {str(k): _decode(value_kind, v, f"{path}.{k}") for k, v in _expect(dict, data, path).items()}
    if dataclasses.is_dataclass(kind):
        return _dataclass(typing.cast(type, kind), data, path)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum(kind, data, path)
    return _scalar(kind, data, path)


def _dataclass(kind: type, data: Any, path: str) -> Any:
    hints = _hints(kind)
    values = _expect(dict, data, path)
    if unknown := sorted(set(values) - set(hints)):
        raise ValueError(f"{path}.{unknown[0]} is not a field; accepted are {', '.join(sorted(hints))}")
    try:
        return kind(**{name: _decode(hints[name], value, f"{path}.{name}") for name, value in values.items()})
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from error


def _tuple(kinds: tuple[Any, ...], data: Any, path: str) -> tuple[Any, ...]:
    items = _expect(list, data, path)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_decode(kinds[0], item, f"{path}[{i}]") for i, item in enumerate(items))
    if len(items) != len(kinds):
        raise ValueError(f"{path} has {len(items)} items: accepted are {len(kinds)}")
    return tuple(_decode(kind, item, f"{path}[{i}]") for i, (kind, item) in enumerate(zip(kinds, items, strict=True)))


def _enum(kind: type[Enum], data: Any, path: str) -> Enum:
    try:
        return kind(data)
    except ValueError:
        raise ValueError(f"{path} is {data!r}: accepted are {', '.join(str(k.value) for k in kind)}") from None


def _scalar(kind: Any, data: Any, path: str) -> Any:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if kind in (int, float, str, bool):
        return _expect(kind, data, path)
    return data


def _expect(kind: type[T], data: Any, path: str) -> T:
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise ValueError(f"{path} is {data!r}: accepted is a value of type {kind.__name__}")
    return data
