"""LeaderWorkerSets: what tells the pods of a group apart, who finds them, where they go, and that an upgrade leaves them alone."""

from __future__ import annotations

import json
from typing import Any

import builders
import pytest
from builders import by_name, containers, manifests, pod_specs, rendered, stored
from placing_world import KEY, Racks, node
from test_i3_pairing import selected

from pd_operator.core.names import COMPONENT, DEPLOYMENT, GROUP_KIND, ROLE, SITE, WORKER
from pd_operator.core.plan import make_plan
from pd_operator.core.sites import Kind, decode
from pd_operator.render.bundle import Bundle, render
from pd_operator.render.group import GROUP_KEY
from pd_operator.render.site import FIELD, HOSTNAME
from pd_operator.upstream import vllm_nodes

EIGHT = {"limits": {"nvidia.com/gpu": 8}}
NODES: dict[str, Any] = {
    "prefill": {"parallelism": {"tensor": 8}, "resources": EIGHT},
    "decode": {"nodes": 3, "parallelism": {"tensor": 24}, "resources": EIGHT},
}


def pods(changes: dict[str, Any] | None = None, **fields: Any) -> dict[str, dict[str, Any]]:
    """Pod templates by what they are: router, prefill, decode (the leader) and worker."""
    _, _, bundle = rendered(builders.deep(NODES, changes or {}), **fields)
    return {name.rsplit("-", 1)[1]: pod for name, pod in pod_specs(bundle).items()}


def group(bundle: Bundle) -> dict[str, Any]:
    (found,) = manifests(bundle, GROUP_KIND)
    return found


def after(args: list[str], flag: str) -> str:
    return args[args.index(flag) + 1]


def test_one_group_is_one_replica() -> None:
    _, _, bundle = rendered(builders.deep(NODES, {"decode": {"replicas": 5}}))
    spec = group(bundle)["spec"]
    assert (spec["replicas"], spec["leaderWorkerTemplate"]["size"]) == (5, 3)
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert [m["metadata"]["name"].rsplit("-", 1)[1] for m in manifests(bundle, "Deployment")] == ["prefill", "router"]


@pytest.mark.parametrize("kind", ["smg", "vllm-router"])
def test_only_the_leader_is_found_by_whoever_looks_for_replicas(kind: str) -> None:
    """The router's discovery, the scale's selector, the budgets, each matches one pod of a group."""
    found = pods({"router": {"type": kind}})
    leader, worker = found["decode"]["metadata"]["labels"], found["worker"]["metadata"]["labels"]
    arguments = containers(found["router"])["router"]["args"]
    for role in ("prefill", "decode"):
        assert not selected(arguments, role).items() <= worker.items()
    assert selected(arguments, "decode").items() <= leader.items()
    assert (leader[ROLE], worker[WORKER]) == ("decode", "decode") and WORKER not in leader and ROLE not in worker
    assert "llm-d.ai/role" not in worker and "smg.ai/kv-connector" not in found["worker"]["metadata"]["annotations"]
    _, _, bundle = rendered(NODES)
    selectors = {m["metadata"]["name"]: m["spec"]["selector"]["matchLabels"] for m in manifests(bundle, "PodDisruptionBudget")}
    matches = {n: [s.items() <= labels.items() for labels in (leader, worker)] for n, s in selectors.items()}
    assert matches == {
        "chat-prefill": [False, False],
        "chat-decode": [True, False],
        "chat-router": [False, False],
        "chat-decode-worker": [False, True],
    }


def test_the_policy_of_the_engines_covers_the_workers() -> None:
    """They exchange activations and KV with each other and with the peers, on ports that are chosen at run time."""
    _, _, bundle = rendered(NODES)
    (policy,) = manifests(bundle, "NetworkPolicy")
    worker = pods()["worker"]["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= worker.items()
    assert policy["spec"]["podSelector"]["matchLabels"] == {DEPLOYMENT: "chat", COMPONENT: "engine"}


def test_the_command_lines_of_a_group_agree_but_for_who_each_is() -> None:
    found = pods({"engine": {"args": ["--seed=1"]}, "decode": {"args": ["--node-name-of-mine", "--node-rankings"]}})
    leader, worker = (containers(found[part])["engine"] for part in ("decode", "worker"))
    assert (after(leader["args"], "--nnodes"), after(leader["args"], "--node-rank")) == ("3", "0")
    assert after(leader["args"], "--master-addr") == "$(POD_IP)" and "--headless" not in leader["args"]
    assert after(worker["args"], "--node-rank") == "$(LWS_WORKER_INDEX)" and "--headless" in worker["args"]
    assert after(worker["args"], "--master-addr") == "$(LWS_LEADER_ADDRESS)"
    same = [w for w in worker["args"] if w != "--headless"]
    differ = [(a, b) for a, b in zip(leader["args"], same, strict=True) if a != b]
    assert differ == [("0", "$(LWS_WORKER_INDEX)"), ("$(POD_IP)", "$(LWS_LEADER_ADDRESS)")]
    assert leader["command"] == worker["command"] and leader["env"] == worker["env"] and leader["image"] == worker["image"]


def test_requests_end_at_the_leader() -> None:
    """It has the probes and the drain. A worker serves no HTTP and has nothing to finish."""
    found = pods({"decode": {"template": {"spec": {"containers": [{"name": "engine", "readinessProbe": {"periodSeconds": 9}}]}}}})
    leader, worker = (containers(found[part])["engine"] for part in ("decode", "worker"))
    assert leader["lifecycle"] == {"preStop": {"sleep": {"seconds": 8}}} and leader["readinessProbe"]["periodSeconds"] == 9
    assert not {"lifecycle", "ports", "startupProbe", "readinessProbe", "livenessProbe"} & worker.keys()
    graces = [found[part]["spec"]["terminationGracePeriodSeconds"] for part in ("decode", "worker")]
    assert graces == [138, 30]
    assert leader["resources"] == worker["resources"]  # `resources` are those of each node


def connector(engine: dict[str, Any]) -> dict[str, Any]:
    """The LMCache child's own settings."""
    config = json.loads(after(engine["args"], "--kv-transfer-config"))
    found: dict[str, Any] = config["kv_connector_extra_config"]["connectors"][1]["kv_connector_extra_config"]
    return found


def test_the_cache_servers_of_an_engine_whose_scheduler_has_ranks_on_all_nodes() -> None:
    """One beside each pod, since the KV of a rank is on its node; each pod is told of all of them in the order of the nodes."""
    found = pods({"lmcache": {}})
    name = f"chat-{builders.revision_of(builders.deep(NODES, {'lmcache': {}}))}-0-decode"
    urls = ",".join(f"tcp://$(LEADER_NAME){part}.{name}:5555" for part in ("", "-1", "-2"))
    variable = {}
    for part in ("decode", "worker"):
        engine, server = containers(found[part])["engine"], containers(found[part])["lmcache"]
        assert connector(engine)["lmcache.mp.server_urls"] == urls and "lmcache.mp.host" not in connector(engine)
        assert after(server["args"], "--host") == "0.0.0.0" and {"lmc-http", "lmc-data"} == {p["name"] for p in server["ports"]}
        (variable[part],) = (v["valueFrom"]["fieldRef"]["fieldPath"] for v in engine["env"] if v["name"] == "LEADER_NAME")
    assert variable == {"decode": "metadata.name", "worker": f"metadata.annotations['{vllm_nodes.LEADER_NAME_ANNOTATION}']"}
    alone = containers(found["prefill"])
    assert after(alone["lmcache"]["args"], "--host") == "127.0.0.1" and "lmcache.mp.server_urls" not in connector(alone["engine"])


def test_the_cache_server_of_an_engine_whose_nodes_run_data_parallel_ranks_of_their_own() -> None:
    """Each scheduler's ranks are on one node, so it needs its own node's server and no other."""
    found = pods({"lmcache": {}, "decode": {"parallelism": {"tensor": 8, "data": 3}}})
    for part in ("decode", "worker"):
        engine, server = containers(found[part])["engine"], containers(found[part])["lmcache"]
        assert connector(engine)["lmcache.mp.host"] == "tcp://127.0.0.1" and after(server["args"], "--host") == "127.0.0.1"
        assert "LEADER_NAME" not in {v["name"] for v in engine["env"]}


@pytest.mark.parametrize("affinity", [None, {"podAntiAffinity": {FIELD: [{"topologyKey": "x"}]}}, "wrong", {"podAntiAffinity": []}])
def test_pods_of_a_group_are_on_nodes_of_their_own(affinity: Any) -> None:
    """Beside what the user asks for; what is malformed goes to the API server as it is."""
    found = pods({"decode": {"template": {"spec": {"affinity": affinity} if affinity else {}}}})
    for part in ("decode", "worker"):
        got = found[part]["spec"].get("affinity")
        if affinity == "wrong":
            assert got == "wrong"
            continue
        *theirs, ours = got["podAntiAffinity"][FIELD]
        assert (ours["topologyKey"], ours["matchLabelKeys"]) == (HOSTNAME, [GROUP_KEY])
        assert theirs == ([{"topologyKey": "x"}] if affinity and affinity["podAntiAffinity"] else [])
    assert "affinity" not in found["prefill"]["spec"]


def test_an_older_api_server_would_drop_what_keeps_groups_apart() -> None:
    """Without matchLabelKeys the term would keep every two pods of the slice apart."""
    found = pods(server_version=(1, 30))
    assert "affinity" not in found["decode"]["spec"] and "affinity" not in found["worker"]["spec"]


def test_recreate_ends_all_groups_at_once() -> None:
    _, _, bundle = rendered(builders.deep(NODES, {"rollout": {"type": "Recreate"}}))
    config = group(bundle)["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
    assert (config["maxSurge"], config["maxUnavailable"]) == (0, "100%")


WORLDS = {
    Kind.PINNED: Racks([node(f"a{n}", "a", 8) for n in range(4)], changes=NODES),
    Kind.FLOATING: Racks([node(f"a{n}", "a", 8) for n in range(3)], changes=NODES),
    Kind.CROSSING: Racks(
        [node(f"{rack}{n}", rack, 8) for rack in "ab" for n in range(2)],
        changes=builders.deep(NODES, {"placement": {"transferDomain": {"mode": "Preferred"}}}),
    ),
}


@pytest.mark.parametrize("kind", WORLDS)
def test_all_pods_of_a_group_go_where_its_slice_goes(kind: Kind) -> None:
    world = WORLDS[kind]
    snapshot = world.snapshot()
    plan = make_plan(snapshot)
    assert plan.refusal is None
    bundle = render(snapshot, plan)
    made = group(bundle)
    site = decode(made["metadata"]["annotations"][SITE])
    assert site.kind is kind
    template = made["spec"]["leaderWorkerTemplate"]
    leader, worker = (template[part]["spec"]["affinity"] for part in ("leaderTemplate", "workerTemplate"))
    assert leader == worker
    if kind is Kind.PINNED:
        (term,) = leader["nodeAffinity"][FIELD]["nodeSelectorTerms"]
        assert term["matchExpressions"] == [{"key": KEY, "operator": "In", "values": ["a"]}]
    if kind is Kind.FLOATING:
        (own,) = leader["podAffinity"][FIELD]
        labels = template["workerTemplate"]["metadata"]["labels"]
        assert own["topologyKey"] == KEY and own["labelSelector"]["matchLabels"].items() <= labels.items()


def test_a_second_slice_has_its_own_name_in_both_templates() -> None:
    changes = {"lmcache": {}, "decode": {"replicas": 2}, "prefill": {"replicas": 2}, "placement": {"maxDomains": 2}}
    world = Racks([node(f"{rack}{n}", rack, 8) for rack in "ab" for n in range(4)], changes=builders.deep(NODES, changes))
    snapshot = world.snapshot()
    bundle = render(snapshot, make_plan(snapshot))
    first, second = manifests(bundle, GROUP_KIND)
    assert world.name(0) in str(first["spec"]) and world.name(1) not in str(first["spec"])
    assert world.name(1) in str(second["spec"]) and world.name(0) not in str(second["spec"])


def test_an_upgrade_leaves_workers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """I12 of the pods that do not serve: their template is stored too."""
    _, _, before = rendered(NODES)
    (revision,) = manifests(before, "ControllerRevision")
    assert set(revision["data"]["templates"]) == {"prefill", "decode", "decode-worker"}
    monkeypatch.setattr(vllm_nodes, "worker_arguments", lambda args: [*args, "--of-the-next-version"])
    _, _, now = rendered(NODES, revisions=(stored(revision),))
    assert group(now)["spec"] == group(before)["spec"] and now.renderer_changed
    _, _, anew = rendered(builders.deep(NODES, {"rollout": {"restartID": "now"}}), revisions=(stored(revision),))
    assert "--of-the-next-version" in str(group(anew)) and not anew.renderer_changed


def test_an_edit_of_the_other_role_keeps_the_stored_group() -> None:
    _, _, before = rendered(NODES)
    (revision,) = manifests(before, "ControllerRevision")
    old = stored(revision)
    edit = builders.deep(NODES, {"prefill": {"template": {"spec": {"priorityClassName": "high"}}}})
    _, _, now = rendered(edit, revisions=(old,))
    (second,) = manifests(now, "ControllerRevision")
    assert {k: v for k, v in second["data"]["templates"].items() if k != "prefill"} == {
        k: v for k, v in old.templates.items() if k != "prefill"
    }


def test_nodes_are_of_class_b() -> None:
    one = builders.deep(NODES, {"decode": {"nodes": 1}})
    assert builders.revision_of(one) == builders.revision_of(NODES)
    names = [next(manifests(rendered(spec)[2], "ControllerRevision"))["metadata"]["name"] for spec in (one, NODES)]
    assert names[0] != names[1]
    kinds = [set(by_name(rendered(spec)[2])) for spec in (one, NODES)]
    assert {k for k, _ in kinds[0] ^ kinds[1]} == {"Deployment", GROUP_KIND, "ControllerRevision", "PodDisruptionBudget"}
