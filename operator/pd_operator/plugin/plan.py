"""`kubectl pdd plan`: what the operator would place where, without doing it.

kubectl pdd plan -f chat.yaml                         against the cluster, changing nothing
kubectl pdd plan -f chat.yaml --save snapshot.json    the same, and keep what was read
kubectl pdd plan -f chat.yaml --snapshot snapshot.json    from that file, without a cluster
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pd_operator.api.types import API_VERSION, PDDeploymentSpec
from pd_operator.core.names import ROLES, Role
from pd_operator.core.placement import saved, table
from pd_operator.core.placement.capacity import ReplicaShape
from pd_operator.core.placement.demand import Demand
from pd_operator.core.placement.planner import place, reserve
from pd_operator.core.placement.requests import replica_shape
from pd_operator.core.placement.result import Placement
from pd_operator.core.snapshot import Snapshot
from pd_operator.plugin.command import Commands, PluginError, answer, kubeconfig_argument
from pd_operator.render.bundle import engine_templates, replica_specs
from pd_operator.upstream import catalog

ANY_IMAGE = "image"  # shapes do not depend on it


@dataclass(frozen=True, slots=True)
class Wanted:
    """One PDDeployment of the file."""

    namespace: str
    name: str
    spec: PDDeploymentSpec

    def count(self, role: Role) -> int:
        """Replicas that the spec asks for; with scaling the least."""
        if self.spec.suspend:
            return 0
        if self.spec.scaling is not None:
            return getattr(self.spec.scaling, role).min_replicas  # type: ignore[no-any-return]
        return self.spec.roles[role].replicas or 1


def add(commands: Commands) -> None:
    """The parser of `plan`."""
    plan = commands.add_parser(
        "plan",
        help="what would be placed where, and why",
        description="What would be placed where, and why. Exit code 1: not everything that is wanted fits now.",
    )
    plan.add_argument("-f", "--filename", required=True, metavar="FILE", help="YAML with PDDeployments, - for standard input")
    plan.add_argument("-n", "--namespace", default="default", help="namespace of objects that name none (default: default)")
    plan.add_argument("-o", "--output", choices=("text", "json"), default="text")
    plan.add_argument("--snapshot", metavar="FILE", help="read capacity from a saved snapshot, not from the cluster")
    plan.add_argument("--save", metavar="FILE", help="write what was read to a file, for --snapshot")
    plan.add_argument("--prefill", type=int, metavar="N", help="plan for N prefill replicas in place of what the file says")
    plan.add_argument("--decode", type=int, metavar="N", help="plan for N decode replicas in place of what the file says")
    kubeconfig_argument(plan)
    plan.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The exit code: 0 = everything fits, 1 = not everything does."""
    wanted = read(_text(args.filename), args.namespace)
    capacity = _saved(args.snapshot) if args.snapshot else _live(args.kubeconfig)
    if args.save:
        _write(args.save, saved.dump(capacity))
    complete, answers = plan_all(wanted, capacity, {"prefill": args.prefill, "decode": args.decode})
    if args.output == "json":
        print(json.dumps([table.document(demand, placement) for demand, placement in answers], indent=2))
    else:
        print("\n".join(table.text(demand, placement) for demand, placement in answers), end="")
    return 0 if complete else 1


def read(text: str, namespace: str) -> list[Wanted]:
    """The PDDeployments of a YAML file; other kinds are left out.

    Raises:
        PluginError: not YAML, none in it, or one that is not valid.
    """
    try:
        documents = [doc for doc in yaml.safe_load_all(text) if isinstance(doc, Mapping)]
    except yaml.YAMLError as exc:
        raise PluginError(f"not YAML: {exc}") from exc
    mine = [doc for doc in documents if doc.get("kind") == "PDDeployment"]
    if not mine:
        raise PluginError(f"no PDDeployment in the file; a document with apiVersion: {API_VERSION}, kind: PDDeployment is accepted")
    return [_wanted(doc, namespace) for doc in mine]


def plan_all(
    wanted: Sequence[Wanted], capacity: saved.Saved, totals: Mapping[str, int | None]
) -> tuple[bool, list[tuple[Demand, Placement]]]:
    """Plan one after the other, each beside what those before it were given; whether everything fits, and the answers."""
    view = capacity.view(frozenset((item.namespace, item.name) for item in wanted))
    complete = True
    answers: list[tuple[Demand, Placement]] = []
    for item in wanted:
        demand = demand_of(item, capacity, totals)
        placement = place(demand, view, explained=len(view.domains(demand.topology_key)) + len(demand.running))
        reserve(demand, view, placement.domains)
        complete &= not any(placement.short)
        answers.append((demand, placement))
    return complete, answers


def demand_of(wanted: Wanted, capacity: saved.Saved, totals: Mapping[str, int | None]) -> Demand:
    """What one PDDeployment wants placed, beside what of it runs already.

    Raises:
        PluginError: its template cannot be read, or a total is not possible.
    """
    spec, target = wanted.spec, wanted.spec.placement.transfer_domain
    given = {role: totals.get(role) for role in ROLES}
    counts = {role: value if (value := given[role]) is not None else wanted.count(role) for role in ROLES}
    shapes = _shapes(wanted)
    try:
        return Demand(
            f"{wanted.namespace}/{wanted.name}",
            counts["prefill"],
            counts["decode"],
            shapes["prefill"],
            shapes["decode"],
            target.topology_key,
            target.mode,
            spec.placement.max_domains,
            running=capacity.running(wanted.namespace, wanted.name, target.topology_key),
        )
    except ValueError as exc:
        raise PluginError(str(exc)) from exc


def _shapes(wanted: Wanted) -> dict[Role, ReplicaShape]:
    spec = wanted.spec
    snapshot = Snapshot(
        namespace=wanted.namespace,
        name=wanted.name,
        uid="",
        generation=1,
        spec=spec,
        now=datetime.now(UTC),
        upstream=catalog.upstream(spec),
        images=dict.fromkeys(("engine", "router", "lmcache"), ANY_IMAGE),
    )
    try:
        templates = engine_templates(snapshot)
        return {role: replica_shape(role, replica_specs(snapshot, templates, role)) for role in ROLES}
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise PluginError(f"{wanted.namespace}/{wanted.name}: its template cannot be read: {exc}") from exc


def _wanted(doc: Mapping[str, Any], namespace: str) -> Wanted:
    meta = doc.get("metadata") or {}
    name = meta.get("name")
    if not name:
        raise PluginError("metadata.name is missing; every PDDeployment needs one")
    try:
        return Wanted(meta.get("namespace") or namespace, name, PDDeploymentSpec.model_validate(doc.get("spec") or {}))
    except ValidationError as exc:
        first = exc.errors()[0]
        raise PluginError(f"{name}: spec.{'.'.join(map(str, first['loc']))}: {first['msg']}") from exc


def _saved(path: str) -> saved.Saved:
    try:
        return saved.load(_text(path))
    except saved.SavedError as exc:
        raise PluginError(f"{path}: {exc}") from exc


def _live(kubeconfig: str | None) -> saved.Saved:
    from pd_operator.kube.read import capacity_objects  # noqa: PLC0415  slow imports that --snapshot does not need

    nodes, pods = answer(capacity_objects(kubeconfig))
    return saved.observed(nodes, pods, datetime.now(UTC).isoformat(timespec="seconds"))


def _text(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text()
    except OSError as exc:
        raise PluginError(f"{path}: {exc.strerror}") from exc


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as exc:
        raise PluginError(f"{path}: {exc.strerror}") from exc
