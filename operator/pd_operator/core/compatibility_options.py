"""What an engine is started with: flags and variables of a role, after the merge that rendering does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pd_operator.api.types import PDDeploymentSpec
from pd_operator.core.names import Role

NO_VALUE: Final = "true"  # of a switch
MAX_SHOWN: Final = 80  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class Option:
    """One flag or variable and the field that sets it."""

    name: str  # --block-size, VLLM_KV_CACHE_LAYOUT
    value: str
    field: str  # spec.decode.args

    @property
    def shown(self) -> str:
        """As the user wrote it, near enough."""
        return self.name if self.value == NO_VALUE and self.name.startswith("-") else f"{self.name}={self.value[:MAX_SHOWN]}"


@dataclass(frozen=True, slots=True)
class Options:
    """Flags and variables of one role; later ones win, as in argparse and in a container's environment."""

    role: Role
    flags: tuple[Option, ...]
    variables: Mapping[str, Option]

    def flag(self, *names: str) -> Option | None:
        """The last setting under any of the names; `--no-x` is not `--x`."""
        return next((o for o in reversed(self.flags) if o.name in names), None)

    def switch(self, name: str) -> Option | None:
        """The last of `--x` and `--no-x`."""
        return self.flag(name, f"--no-{name.removeprefix('--')}")

    def on(self, name: str) -> bool | None:
        """Whether a switch was set on or off; None: not said."""
        last = self.switch(name)
        return None if last is None else last.name == name and last.value.lower() not in ("false", "0")

    def number(self, *names: str) -> int | None:
        """A flag's whole number; None when it is not there, or is none."""
        last = self.flag(*names)
        return int(last.value) if last is not None and last.value.isascii() and last.value.isdigit() else None

    def nested(self, *names: str) -> dict[str, Any]:
        """A JSON flag with the dotted forms over it: `--speculative-config.method mtp`. What is no JSON object counts as none."""
        found: dict[str, Any] = {}
        for option in self.flags:
            base, _, path = option.name.partition(".")
            if base in names and path:
                found[path] = _scalar(option.value)
            elif base in names:
                found = _object(option.value)
        return found

    def variable(self, name: str) -> str:
        """A variable's literal value; "" when it is absent or comes from elsewhere."""
        found = self.variables.get(name)
        return found.value if found else ""


def options(spec: PDDeploymentSpec, role: Role) -> Options:
    """What a role's engine gets: spec.engine first, then the role, then the engine container of the role's template."""
    mine = spec.roles[role]
    flags = (*_flags("spec.engine.args", spec.engine.args), *_flags(f"spec.{role}.args", mine.args))
    variables: dict[str, Option] = {}
    for field, entries in (("spec.engine.env", spec.engine.env), (f"spec.{role}.env", mine.env)):
        for var in entries:
            variables[var.name] = Option(var.name, var.value or "", field)
    for name, value in _template(mine.template):
        variables[name] = Option(name, value, f"spec.{role}.template.spec.containers[engine].env")
    return Options(role, flags, variables)


def _flags(field: str, args: Sequence[str]) -> tuple[Option, ...]:
    """`--a=1`, `--a 1`, `--a`, `--a_b.c 1` -> options; short flags as they are."""
    found: list[Option] = []
    takes = False  # whether a value may follow
    for arg in args:
        is_flag = arg.startswith("-") and not arg.lstrip("-")[:1].isdigit()
        if is_flag:
            name, equals, value = arg.partition("=")
            head, dot, path = name.partition(".")
            head = head.replace("_", "-") if head.startswith("--") else head
            found.append(Option(f"{head}{dot}{path}", value if equals else NO_VALUE, field))
            takes = not equals
        elif takes:
            found[-1] = Option(found[-1].name, arg, field)
            takes = False
    return tuple(found)


def _template(template: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Literal variables of the engine container; a malformed template is refused elsewhere."""
    pod = template.get("spec")
    containers = pod.get("containers") if isinstance(pod, Mapping) else None
    for container in containers if isinstance(containers, list) else []:
        if not isinstance(container, Mapping) or container.get("name") != "engine":
            continue
        entries = container.get("env")
        for var in entries if isinstance(entries, list) else []:
            if isinstance(var, Mapping) and isinstance(var.get("name"), str):
                yield var["name"], str(var.get("value") or "")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
