"""Turns answers into shapes that can be compared: which keys and types there are, not which values."""

import json
import re
from typing import Any

Shape = Any
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="(?:[^"\\]|\\.)*"')


def shape(value: Any) -> Shape:
    """`value` with every scalar replaced by its type; a list becomes the list of the different shapes of its items."""
    if isinstance(value, dict):
        return {str(key): shape(item) for key, item in value.items()}
    if isinstance(value, list):
        different: list[Shape] = []
        for item in value:
            one = shape(item)
            if one not in different:
                different.append(one)
        return different
    if value is None:
        return "null"
    return type(value).__name__


def error_values(body: Any) -> dict[str, Any] | None:
    """What clients look at in vLLM's error body: type, param and code. Positions in the body are replaced by N."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return None
    param = error.get("param")
    return {
        "type": error.get("type"),
        "param": re.sub(r"\d+", "N", param) if isinstance(param, str) else param,
        "code": error.get("code"),
    }


def events(text: str) -> list[Shape]:
    """Shapes of the events of a stream in order, equal neighbours once: the number of tokens does not matter."""
    found: list[Shape] = []
    for line in text.split("\n"):
        if not line.startswith("data: "):
            continue
        data = line[len("data: ") :].strip()
        one = data if data == "[DONE]" else shape(json.loads(data))
        if not found or found[-1] != one:
            found.append(one)
    return found


def stream_texts(text: str) -> list[str]:
    """The pieces of text of a stream with one choice."""
    pieces = []
    for line in text.split("\n"):
        if line.startswith("data: {"):
            for choice in json.loads(line[len("data: ") :]).get("choices", []):
                pieces.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return pieces


def families(page: str) -> dict[str, dict[str, Any]]:
    """Metric families of a Prometheus page: type and label names (of all series together)."""
    found: dict[str, dict[str, Any]] = {}
    types: dict[str, str] = {}
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            types[name] = kind
        elif line and not line.startswith("#"):
            match = _SAMPLE.match(line)
            if match is None:
                continue
            name = family_of(match.group(1), types)
            labels = set(_LABEL.findall(match.group(2) or "")) - {"le", "quantile"}
            entry = found.setdefault(name, {"type": types.get(name, "untyped"), "labels": []})
            entry["labels"] = sorted(set(entry["labels"]) | labels)
    return found


def family_of(sample: str, types: dict[str, str]) -> str:
    """The family that a sample belongs to."""
    if sample in types:
        return sample
    for suffix in ("_bucket", "_count", "_sum"):
        if sample.endswith(suffix) and sample.removesuffix(suffix) in types:
            return sample.removesuffix(suffix)
    return sample


def samples(page: str) -> dict[str, float]:
    """All samples of a Prometheus page by their text before the value, labels sorted as they stand."""
    found = {}
    for line in page.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def total(page: str, name: str, **labels: str) -> float:
    """Sum of the samples called `name` that have these labels; 0 if there is none (absent before the first event)."""
    result = 0.0
    for text, value in samples(page).items():
        sample, _, rest = text.partition("{")
        if sample == name and all(f'{key}="{wanted}"' in rest for key, wanted in labels.items()):
            result += value
    return result


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Leaves of nested dicts by their path; everything that is no dict is a leaf."""
    if not isinstance(value, dict) or not value:
        return {path: value}
    leaves: dict[str, Any] = {}
    for key, item in value.items():
        leaves |= flatten(item, f"{path}/{key}" if path else str(key))
    return leaves
