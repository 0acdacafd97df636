"""The chart's PodMonitors, recording rules, alerts, dashboards and runbooks on a real Prometheus, that finds real pods through a
real API server and scrapes the operator's own /metrics.

Nodes are fake, so the pages of engines and LMCache servers are those of stand-ins that do real handoffs, under the labels of the
operator's pods; the router's page is made up. The operator scales by this Prometheus.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

import generated
from cluster.handle import Cluster
from cluster.tools import tool
from monitor.pages import Pages
from monitor.podmonitor import jobs
from monitor.pods import Pod
from monitor.prometheus import Prometheus
from opsrunner import state, waits
from opsrunner.api import Api
from opsrunner.process import Operator
from pd_operator.upstream import signals_labels as labels
from standin.local import Local, handoff, with_cache

pytest_plugins = ("opsrunner.fixtures",)
pytestmark = pytest.mark.timeout(300)

CHART = generated.ROOT / "charts" / "pd-operator"
RUNBOOKS = sorted((generated.ROOT / "docs" / "operations" / "runbooks").glob("*.md"))
ON = ("podMonitor", "servingMonitors", "recordingRules", "alerts", "dashboards")
NAME = "chat"


def rendered(space: str) -> list[dict[str, Any]]:
    """The chart with all of it turned on."""
    argv = [str(tool("helm")), "template", "pd-operator", str(CHART), "--namespace", space]
    argv += ["--set", "image.repository=example.org/pd-operator", *(f"--set={part}.enabled=true" for part in ON)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def documented() -> dict[str, Any]:
    """The scrape jobs of docs/operations/monitoring.md."""
    text = (generated.ROOT / "docs" / "operations" / "monitoring.md").read_text()
    (found,) = (block for block in re.findall(r"^```yaml\n(.*?)^```$", text, flags=re.M | re.S) if "scrape_configs" in block)
    parsed: dict[str, Any] = yaml.safe_load(found)
    return parsed


class World:
    """Everything at once, and traffic that does not end."""

    def __init__(self, cluster: Cluster, api: Api, space: str, folder: Path, stack: ExitStack) -> None:
        self.cluster, self.space = cluster, space
        self.manifests = rendered(space)
        local = stack.enter_context(Local())
        cache = local.cache()
        self.prefill = local.engine("kv_producer", kv=with_cache("kv_producer", cache.ports["data"]))
        self.decode = local.engine("kv_consumer")
        self.pages = Pages({"router": Pod("router", queued=0)})
        stack.callback(self.pages.kill, "router")
        self.addresses = {
            "prefill": self.prefill.url,
            "decode": self.decode.url,
            "": self.pages.url("router"),
            "lmcache": cache.url,
        }
        configuration: dict[str, Any] = {}
        self.server = Prometheus(configuration)
        signals = {"source": "prometheus", "tickSeconds": 1, "prometheus": {"url": self.server.url}}
        settings = {"SIGNALS": json.dumps(signals), "LOG_LEVEL": "INFO"}
        self.operator = stack.enter_context(Operator(cluster.kubeconfig, [space], home=space, folder=folder, settings=settings))
        configuration |= self._configuration(folder)
        stack.enter_context(self.server)
        scaling = {"mode": "Auto", "prefill": {"maxReplicas": 1}, "decode": {"maxReplicas": 1}}
        # Advisory: the canary can prove nothing on fake nodes, and what serves is watched.
        spec = {"lmcache": {"l1Size": "1Gi"}, "router": {"replicas": 1}, "scaling": scaling, "verification": "Advisory"}
        api.create(state.pdd(space, NAME, **spec))
        waits.ready(api, space, NAME)
        self._end = threading.Event()
        traffic = threading.Thread(target=self._traffic, daemon=True)
        traffic.start()
        stack.callback(traffic.join, 20)
        stack.callback(self._end.set)

    def _configuration(self, folder: Path) -> dict[str, Any]:
        """Prometheus' configuration out of the chart's manifests, everything once a second."""
        files = []
        for rule in (m for m in self.manifests if m["kind"] == "PrometheusRule"):
            files.append(folder / f"{rule['metadata']['name']}.yaml")
            groups = [{k: v for k, v in group.items() if k != "interval"} for group in rule["spec"]["groups"]]
            files[-1].write_text(yaml.safe_dump({"groups": groups}))
        found = []
        for monitor in (m for m in self.manifests if m["kind"] == "PodMonitor"):
            made = jobs(monitor, self.cluster.kubeconfig, [self.space])
            if monitor["metadata"]["name"] == "pd-operator":  # a process beside the cluster, and no pod
                made[0].pop("kubernetes_sd_configs")
                made[0].pop("relabel_configs")
                own = {"namespace": self.space, "pod": "operator-0", "job": "pd-operator"}
                made[0]["static_configs"] = [{"targets": [self.operator.address], "labels": own}]
            for job in made:
                job |= {"scrape_interval": "1s"}
                job.get("relabel_configs", []).extend(self._elsewhere())
            found += made
        plain = documented()["scrape_configs"][1]  # what a Prometheus without its operator is told: it finds the same a second time
        plain["kubernetes_sd_configs"][0] |= found[-1]["kubernetes_sd_configs"][0]
        plain["relabel_configs"] += self._elsewhere()
        found.append({**plain, "scrape_interval": "1s"})
        return {"global": {"evaluation_interval": "1s"}, "rule_files": [str(f) for f in files], "scrape_configs": found}

    def _elsewhere(self) -> list[dict[str, Any]]:
        """Where the pages of pods of fake nodes are. The addresses are the only thing here that is not the chart's."""
        rules = []
        for side, url in self.addresses.items():
            source = [labels.ROLE, labels.CONTAINER]
            wanted = ".*;lmcache" if side == "lmcache" else f"{side};{'engine' if side else 'router'}"
            replaced = {"target_label": "__address__", "replacement": url.removeprefix("http://")}
            rules.append({"source_labels": source, "regex": wanted, **replaced})
        return rules

    def _traffic(self) -> None:
        """Handoffs one after the other, each with a prompt of its own."""
        number = 0
        while not self._end.is_set():
            number += 1
            text = f"{number} " + "one two three four five six seven eight " * 20
            handoff(self.prefill, self.decode, prompt=text, max_tokens=8)
            self.pages.pods = {"router": Pod("router", queued=0, offered=number)}
            self._end.wait(0.2)

    def get(self, path: str, **query: str) -> Any:
        """`data` of an answer of Prometheus."""
        url = f"{self.server.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def dashboard(self, name: str) -> dict[str, Any]:
        """As the chart's ConfigMap has it."""
        (found,) = (m for m in self.manifests if m["metadata"]["name"] == f"pd-operator-dashboard-{name}")
        (text,) = found["data"].values()
        parsed: dict[str, Any] = json.loads(text)
        return parsed


@pytest.fixture(scope="module")
def world(kwok_cluster: Cluster, api: Api, space: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        made = World(kwok_cluster, api, space, Path(tmp_path_factory.mktemp("world")), stack)
        ready = 'pd_operator_scaling_reason{reason!="SignalsUnknown"} and on () pdserve:output_tokens:rate > 0'
        waits.until("a decision on known signals", lambda: made.server.query(ready), timeout=90, show=made.operator.tail)
        yield made


def test_every_page_is_found_with_the_labels_of_the_contract(world: World, api: Api) -> None:
    expected = set()
    for pod in state.pods(api, world.space, NAME):
        own = pod["metadata"]["labels"]
        if own["app.kubernetes.io/component"] == "canary":
            continue
        spec = pod["spec"]
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            where = [world.space, pod["metadata"]["name"], container["name"]]
            expected.add((*where, *(own.get(label, "") for label in labels.POD_TARGET_LABELS)))
    wanted = (labels.NAMESPACE, labels.POD, labels.CONTAINER, labels.DEPLOYMENT, labels.SLICE, labels.ROLE)
    assert len(expected) == 5, "engine and LMCache server of each role, and the router"

    def active() -> list[dict[str, Any]]:
        return [t for t in world.get("targets", state="active")["activeTargets"] if labels.DEPLOYMENT in t["labels"]]

    def scraped() -> list[dict[str, Any]]:
        found = active()
        return found if {target["health"] for target in found} == {"up"} else []

    found = waits.until("no page to be late", scraped, show=lambda: str([(t["scrapeUrl"], t["lastError"]) for t in active()]))
    for documented_ in (False, True):
        mine = [t for t in found if (t["scrapePool"] == "pd-serving") == documented_]
        assert {tuple(target["labels"].get(label, "") for label in wanted) for target in mine} == expected
        assert len(mine) == 5


def test_the_documented_scrape_jobs_are_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(documented()))
    done = subprocess.run([str(tool("promtool")), "check", "config", str(file)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["fleet", "deployment"])
def test_each_query_of_each_panel_answers(world: World, name: str) -> None:
    variables = chosen(world, name)
    for panel in world.dashboard(name)["panels"]:
        for target in panel.get("targets", ()):
            expression = filled(target["expr"], variables)
            waits.until(f"an answer to {panel['title']}: {expression}", lambda asked=expression: world.server.query(asked))


@pytest.mark.parametrize("name", ["fleet", "deployment"])
def test_variables_offer_what_is_there(world: World, name: str) -> None:
    offered = options(world, name)
    assert world.space in offered["namespace"]
    assert name == "fleet" or offered["name"] == [NAME]
    if name == "fleet":
        other = filled(world.dashboard(name)["panels"][1]["targets"][0]["expr"], {"namespace": "no-such"})
        assert world.server.query(other) == [], "the variable narrows"


def options(world: World, name: str) -> dict[str, list[str]]:
    """What each variable offers, the first value of those before it chosen, as Grafana asks for label_values()."""
    found: dict[str, list[str]] = {}
    for variable in world.dashboard(name)["templating"]["list"]:
        if variable["type"] == "query":
            series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            known = {"namespace": world.space} if "namespace" in found else {}
            found[variable["name"]] = world.get(f"label/{label}/values", **{"match[]": filled(series, known)})
    return found


def chosen(world: World, name: str) -> dict[str, str]:
    return {"namespace": world.space} | ({"name": options(world, name)["name"][0]} if name == "deployment" else {})


def filled(expression: str, variables: dict[str, str]) -> str:
    """With Grafana's variables replaced."""
    for key, value in {**variables, "__rate_interval": "10s"}.items():
        expression = expression.replace(f"${key}", value)
    assert "$" not in expression, expression
    return expression


def test_queries_of_the_recipes_answer(world: World, api: Api) -> None:
    """KEDA's triggers, and what prometheus-adapter makes of its rules for an HPA that asks for this deployment."""
    (pod,) = (p["metadata"]["name"] for p in state.pods(api, world.space, NAME, role="decode"))
    expressions = []
    for page in ("hpa.md", "keda.md"):
        text = (generated.ROOT / "docs" / "recipes" / page).read_text()
        for document in (yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", text, flags=re.M | re.S)):
            expressions += [t["metadata"]["query"] for t in document.get("spec", {}).get("triggers", ())]
            for rule in [*document.get("rules", ()), *document.get("externalRules", ())]:
                assert world.server.query(rule["seriesQuery"])
                whose = f'pod=~"{pod}"' if rule in document.get("rules", ()) else f'{labels.DEPLOYMENT}="chat"'
                own = f'namespace="team",{whose}'
                query = rule["metricsQuery"].replace("<<.Series>>", rule["seriesQuery"].partition("{")[0])
                expressions.append(query.replace("<<.LabelMatchers>>", own).replace("<<.GroupBy>>", "pod"))
    assert len(expressions) == 6
    for expression in expressions:
        ((_, value),) = world.server.query(expression.replace('namespace="team"', f'namespace="{world.space}"'))
        assert value >= 0, expression


def test_rules_evaluate_and_nothing_fires(world: World) -> None:
    rules = [rule for group in world.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}, [rule["lastError"] for rule in rules if rule["health"] != "ok"]
    assert len([rule for rule in rules if rule["type"] == "alerting"]) == len(RUNBOOKS)
    # What was pending while the object started ends: nothing is on its way to fire.
    waits.until("no alert to be pending", lambda: not world.server.query("ALERTS"), show=lambda: str(world.server.query("ALERTS")))


def test_a_decode_that_computes_prompts_is_seen(world: World) -> None:
    """What PDFallbackRecompute reads: requests that come to decode without a handoff."""
    own = f'{labels.ROLE}="decode",source="local_compute",{labels.NAMESPACE}="{world.space}"'
    source = f"max(vllm:prompt_tokens_by_source_total{{{own}}})"
    ((_, before),) = world.server.query(source)
    world.decode.client.json("POST", "/v1/completions", {"prompt": "nobody prefilled this " * 10, "max_tokens": 2})
    waits.until("decode's own prompt tokens", lambda: world.server.query(f"{source} > {before}"))
    (rule,) = (r for g in world.get("rules")["groups"] for r in g["rules"] if r["name"] == "PDFallbackRecompute")
    ((metric, _),) = world.server.query(re.sub(r"> 0\.05$", "> 0", rule["query"].strip()))
    assert (metric["namespace"], metric["name"]) == (world.space, NAME)


@pytest.mark.parametrize("page", RUNBOOKS, ids=lambda page: page.stem)
def test_commands_and_queries_of_a_runbook_run(world: World, page: Path) -> None:
    """But for `kubectl logs`: pods of fake nodes have none."""
    text = page.read_text()
    environment = {**os.environ, "KUBECONFIG": str(world.cluster.kubeconfig), "NAMESPACE": world.space, "NAME": NAME}
    environment["PATH"] = f"{tool('kubectl').parent}:{environment['PATH']}"
    (commands,) = re.findall(r"^```bash\n(.*?)^```$", text, flags=re.M | re.S)
    wanted = "\n".join(line for line in commands.splitlines() if not line.startswith("kubectl logs "))
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", wanted], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (queries,) = re.findall(r"^```promql\n(.*?)^```$", text, flags=re.M | re.S)
    for query in queries.splitlines():
        world.server.query(query)
