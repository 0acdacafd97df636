"""Pod templates of slices with a site: names, affinity beside the user's own, and whole manifests (golden) of each kind of site."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import builders
import pytest
import yaml
from builders import by_name, pod_specs
from placing_world import KEY, RACK, Racks, Slice, node, pinned
from test_i3_pairing import selected
from test_render_golden import Plain

from pd_operator.core.names import COMPONENT, ROLES, SITE, SLICE
from pd_operator.core.plan import make_plan
from pd_operator.core.rollout import SlicePlan, State
from pd_operator.core.sites import Kind, Site, decode
from pd_operator.render.bundle import Bundle, render
from pd_operator.render.engine import pod_template
from pd_operator.render.site import FIELD, SOFT, template_of

GOLDEN = builders.ROOT / "tests" / "golden" / "sites"
UPDATE = os.environ.get("UPDATE_GOLDEN") == "1"
TWO_GPUS = {"decode": {"resources": {"limits": {"nvidia.com/gpu": 2}}}}
PAIR = (node("a0", "a", 1), node("a1", "a", 2))
WORLDS: dict[str, Racks] = {
    "pinned": Racks(PAIR, changes=TWO_GPUS),
    "floating": Racks((node("a0", "a", 1), node("b0", "b", 2)), changes=TWO_GPUS),
    "unseen": Racks(changes=TWO_GPUS, observed=False),
    "crossing": Racks((node("a0", "a"), node("b0", "b")), changes={"placement": {"transferDomain": {"mode": "Preferred"}}}),
}


def bundle_of(world: Racks) -> Bundle:
    snapshot = world.snapshot()
    plan = make_plan(snapshot)
    assert plan.refusal is None
    return render(snapshot, plan)


@pytest.mark.parametrize("name", WORLDS)
def test_golden(name: str) -> None:
    """The site and the affinity of both roles; everything else is as without a topology key."""
    shown = []
    for (_, manifest_name), manifest in by_name(bundle_of(WORLDS[name])).items():
        if manifest["kind"] == "Deployment" and SITE in manifest["metadata"]["annotations"]:
            affinity = manifest["spec"]["template"]["spec"]["affinity"]
            shown.append({"name": manifest_name, "site": manifest["metadata"]["annotations"][SITE], "affinity": affinity})
    text = yaml.dump_all(shown, Dumper=Plain, sort_keys=False, width=132)
    path = GOLDEN / f"{name}.yaml"
    if UPDATE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert len(shown) == 2 and path.read_text() == text, f"{path.name} differs; if that is meant: UPDATE_GOLDEN=1 pytest {__file__}"


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(WORLDS)


@pytest.mark.parametrize("name", WORLDS)
def test_without_its_site_a_workload_is_what_it_was_before(name: str) -> None:
    """Placement adds an affinity and an annotation and touches nothing else of an engine, a router or a Service."""
    placed = by_name(bundle_of(WORLDS[name]))
    spec = builders.deep(WORLDS[name].changes, {"placement": None})
    plain = by_name(builders.rendered(spec)[2])
    old, new = WORLDS[name].revision, builders.revision_of(spec)

    def bare(manifest: dict[str, Any]) -> str:
        found = builders.deep(manifest, {"metadata": {"annotations": None}})
        if manifest["kind"] == "Deployment":
            found["spec"]["template"]["spec"].pop("affinity", None)
        return yaml.safe_dump(found).replace(old, new)

    for kind, manifest_name in placed:
        if kind != "ControllerRevision":
            assert bare(placed[kind, manifest_name]) == bare(plain[kind, manifest_name.replace(old, new)]), manifest_name
    assert len(placed) == len(plain)


def test_a_second_slice_of_a_revision_has_its_own_name_everywhere() -> None:
    """Also in what the ControllerRevision stores for slice 0: the coordinator's address, the spread of the pods (I3)."""
    changes = {"lmcache": {"p2p": {"enabled": True}}, "prefill": {"replicas": 2}, "decode": {"replicas": 2}}
    changes["placement"] = {"maxDomains": 2}
    world = Racks([node(f"{d}{n}", d) for d in "ab" for n in (0, 1)], changes=changes)
    bundle = bundle_of(world)
    pods = pod_specs(bundle)
    first, second = world.name(0), world.name(1)
    assert {name.rsplit("-", 1)[0] for name in pods} == {first, second}
    for name, pod in pods.items():
        mine, other = (first, second) if name.startswith(first) else (second, first)
        text = yaml.safe_dump(pod)
        assert mine in text and other not in text, name
    for slice_ in (first, second):
        args = pods[f"{slice_}-router"]["spec"]["containers"][0]["args"]
        for role in ROLES:
            matched = [n for n, pod in pods.items() if selected(args, role).items() <= pod["metadata"]["labels"].items()]
            assert matched == [f"{slice_}-{role}"]
    assert [m["metadata"]["name"] for m in builders.manifests(bundle, "ControllerRevision")] != []
    assert {("Service", first), ("Service", second)} < set(by_name(bundle))


def test_names_of_many_slices_fit_a_dns_label() -> None:
    name = f"{'a' * 30}-{'f' * 8}-63-coordinator"
    assert len(name) <= 63


USERS = {
    "nodeAffinity": {
        FIELD: {"nodeSelectorTerms": [{"matchExpressions": [{"key": "x", "operator": "Exists"}]}, {"matchFields": []}]}
    },
    "podAntiAffinity": {FIELD: [{"topologyKey": "kubernetes.io/hostname", "labelSelector": {}}]},
    "podAffinity": {FIELD: [{"topologyKey": "zone", "labelSelector": {}}], SOFT: []},
}


def affinity(site: Site, role: str = "prefill", theirs: dict[str, Any] | None = None) -> dict[str, Any]:
    changes = builders.deep(RACK, {"prefill": {"template": {"spec": {"affinity": theirs}}}} if theirs else {})
    snapshot = builders.make_snapshot(changes)
    revision = builders.revision_of(changes)
    slice_ = SlicePlan(f"chat-{revision}-3", revision, State.DARK, site=site)
    found = template_of(pod_template(snapshot, role, revision), snapshot, slice_, role)  # type: ignore[arg-type]
    result: dict[str, Any] = found["spec"]["affinity"]
    return result


def test_the_users_affinity_stays_and_ours_goes_into_each_of_its_alternatives() -> None:
    """Terms of a node selector are alternatives: one without ours would let a pod leave its domain."""
    found = affinity(pinned("a"), theirs=USERS)
    ours = {"key": KEY, "operator": "In", "values": ["a"]}
    terms = found["nodeAffinity"][FIELD]["nodeSelectorTerms"]
    assert terms == [
        {"matchExpressions": [{"key": "x", "operator": "Exists"}, ours]},
        {"matchFields": [], "matchExpressions": [ours]},
    ]
    assert {k: found[k] for k in ("podAntiAffinity", "podAffinity")} == {k: USERS[k] for k in ("podAntiAffinity", "podAffinity")}
    floating = affinity(Site(Kind.FLOATING, KEY), theirs=USERS)
    assert len(floating["podAffinity"][FIELD]) == 2 and floating["nodeAffinity"] == USERS["nodeAffinity"]


def test_the_anchor_may_be_first_and_the_other_role_waits_for_it() -> None:
    site = Site(Kind.FLOATING, KEY, "", "decode")
    (anchor,), (other,) = (affinity(site, role)["podAffinity"][FIELD] for role in ("decode", "prefill"))
    slice_ = f"chat-{builders.revision_of(RACK)}-3"
    assert anchor == {"topologyKey": KEY, "labelSelector": {"matchLabels": {SLICE: slice_, COMPONENT: "engine"}}}
    assert other["labelSelector"]["matchLabels"] == {SLICE: slice_, COMPONENT: "engine", "pdserve.dev/role": "decode"}


@pytest.mark.parametrize(
    "site",
    [
        Site(),
        pinned("a"),
        Site(Kind.FLOATING, KEY, "", "prefill", ("a", "b"), ("n1",)),
        Site(Kind.FLOATING, KEY),
        Site(Kind.CROSSING, KEY, "a"),
        Site(Kind.CROSSING, KEY),
    ],
)
def test_a_site_is_read_back_as_it_was_written(site: Site) -> None:
    assert decode(site.encode()) == site


@pytest.mark.parametrize("text", ["x", "[]", "{}", '{"kind":"Elsewhere","key":"k"}', '{"kind":"Pinned"}', "null", '{"kind":[]}'])
def test_what_we_never_wrote_is_no_site(text: str) -> None:
    assert decode(text) == Site()


def test_a_slice_that_exists_is_rendered_as_it_stands_on_its_workloads() -> None:
    """No edit of the nodes' world changes the affinity of a slice that runs: that would roll its pods."""
    site = Site(Kind.FLOATING, KEY, "", "decode", ("z",), ("old",))
    world = Racks((*PAIR, node("b0", "b", 8)), [Slice(site, ["a0"], ["a1"])])
    slices = {
        m["metadata"]["annotations"][SITE] for m in by_name(bundle_of(world)).values() if SITE in m["metadata"]["annotations"]
    }
    assert slices == {site.encode()}


def test_the_stored_template_has_no_site() -> None:
    """It is that of every slice of the revision."""
    (stored,) = builders.manifests(bundle_of(WORLDS["pinned"]), "ControllerRevision")
    assert all("affinity" not in template["spec"] for template in stored["data"]["templates"].values())
    again = replace(WORLDS["pinned"].snapshot(), revisions=(builders.stored(stored),))
    assert not render(again, make_plan(again)).renderer_changed
