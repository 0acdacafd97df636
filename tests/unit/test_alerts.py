"""Every alert, with promtool: it fires on its symptom and not before its time, not when all is well, rightly when series vanish."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import generated
from cluster.tools import tool
from pd_operator.controller.metric_docs import families
from pd_operator.upstream import signals_catalog as catalog
from pd_operator.upstream import signals_promql as promql
from pd_operator.upstream import signals_vllm

CHART = generated.ROOT / "charts" / "pd-operator"
FILE = CHART / "files" / "rules" / "alerts.yaml"
RULES: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["groups"][0]["rules"]
RUNBOOKS = generated.ROOT / "docs" / "operations" / "runbooks"
ONE = 'namespace="team",name="chat"'
POD = 'pod="op-0",instance="op-0"'  # the operator's
LEADER = f'pd_operator_leader{{namespace="pd-operator",{POD}}}'
LIMITED = f'pd_operator_pdpool_condition{{{ONE},role="decode",type="ScalingLimited",status="True",reason="%s",{POD}}}'
INPUT = f'pd_operator_scaling_input{{{ONE},role="%s",input="%s",{POD}}}'
DECODE = 'namespace="team",pdserve_dev_deployment="chat",pdserve_dev_role="decode",pod="d-0"'
SOURCE = f'vllm:prompt_tokens_by_source_total{{{DECODE},source="%s"}}'
ACTIVE = f'pd_operator_pdpool_condition{{{ONE},role="decode",type="ScalingActive",status="False",reason="%s",{POD}}}'


@dataclass(frozen=True)
class Case:
    """Series of an alert that is to fire `after` so many minutes (its `for`, and what a window needs), and of the same when all is
    well. A value is held for 60 minutes; with a + it is the growth a minute."""

    alert: str
    after: int
    sick: dict[str, str]
    well: dict[str, str]
    labels: str = '{alertname="%s",namespace="team",name="chat"}'


def ready(status: str, reason: str) -> str:
    return f'pd_operator_pddeployment_condition{{{ONE},type="Ready",status="{status}",reason="{reason}",{POD}}}'


SERVING = f"pd_operator_pddeployment_serving_slices{{{ONE},{POD}}}"
ERRORS = f'pd_operator_reconcile_total{{namespace="pd-operator",result="%s",{POD}}}'
DEGRADED = f'pd_operator_pddeployment_condition{{{ONE},type="Degraded",status="%s",reason="%s",{POD}}}'
HANDED = f"pd_operator_handoff_%s_total{{{ONE},{POD}}}"
CASES = [
    Case("PDDegraded", 5, {DEGRADED % ("True", "CacheDown"): "1"}, {DEGRADED % ("False", "AsExpected"): "1"}),
    Case("PDOperatorDown", 5, {LEADER: "0"}, {LEADER: "1"}, '{alertname="%s",namespace="pd-operator"}'),
    Case(
        "PDReconcileErrors", 15, {ERRORS % "error": "+1", LEADER: "1"},
        {ERRORS % "error": "3", ERRORS % "done": "+100", LEADER: "1"},
        '{alertname="%s",namespace="pd-operator"}',
    ),
    Case("PDDeploymentNotReady", 15, {ready("False", "CrashLoop"): "1"}, {ready("True", "Ready"): "1"}),
    Case("PDSliceWedged", 1, {f"pd_operator_pddeployment_excluded_domains{{{ONE},{POD}}}": "1"},
         {f"pd_operator_pddeployment_excluded_domains{{{ONE},{POD}}}": "0"}),
    Case(
        "PDDecodeLimited", 10,
        {f'pd_operator_scaling_bottleneck{{{ONE},bottleneck="Decode",{POD}}}': "1", LIMITED % "MaxGPUs": "1"},
        {f'pd_operator_scaling_bottleneck{{{ONE},bottleneck="Decode",{POD}}}': "1", LIMITED % "Cooldown": "1"},
    ),
    Case(
        "PDHandoffBacklogOld", 5,
        {INPUT % ("decode", "wait"): "3", INPUT % ("decode", "wait_budget"): "2"},
        {INPUT % ("decode", "wait"): "1", INPUT % ("decode", "wait_budget"): "2"},
    ),
    Case("PDHandoffPathBroken", 1, {f'pd_operator_scaling_alert{{{ONE},alert="BrokenPath",{POD}}}': "1"},
         {f'pd_operator_scaling_alert{{{ONE},alert="BrokenPath",{POD}}}': "0"}),
    Case("PDPrefillStalled", 3, {f'pd_operator_scaling_alert{{{ONE},alert="StalledEngine",{POD}}}': "1"},
         {f'pd_operator_scaling_alert{{{ONE},alert="StalledEngine",{POD}}}': "0"}),
    Case(  # 60,000 tokens at 2 x 5,000 a second are 6 s
        "PDQueueTooLong", 5,
        {INPUT % ("prefill", "Q"): "60000", INPUT % ("prefill", "V"): "5000", INPUT % ("prefill", "N"): "2",
         f"pd_operator_scaling_max_queue_seconds{{{ONE},{POD}}}": "5"},
        {INPUT % ("prefill", "Q"): "40000", INPUT % ("prefill", "V"): "5000", INPUT % ("prefill", "N"): "2",
         f"pd_operator_scaling_max_queue_seconds{{{ONE},{POD}}}": "5"},
    ),
    Case("PDSignalsUnknown", 5, {ACTIVE % "SignalsUnknown": "1"}, {ACTIVE % "External": "1"},
         '{alertname="%s",namespace="team",name="chat",role="decode"}'),
    Case(
        "PDFallbackRecompute", 6,
        {SOURCE % "local_compute": "+100", SOURCE % "external_kv_transfer": "+900"},
        {SOURCE % "local_compute": "+1", SOURCE % "external_kv_transfer": "+900"},
    ),
]  # fmt: skip
EMPTY_QUEUE = {INPUT % ("prefill", "Q"): "0", INPUT % ("prefill", "V"): "5000", INPUT % ("prefill", "N"): "0"}
# The same from what the operator counts, without the engines' series.
COUNTED = Case(
    "PDFallbackRecompute",
    6,
    {HANDED % "fallback": "+10", HANDED % "transfers": "+90"},
    {HANDED % "fallback": "+1", HANDED % "transfers": "+90"},
)
# More that must not fire: name -> series.
QUIET = {
    "suspended": {ready("False", "Suspended"): "1", SERVING: "1x5 0x60"},
    "never served": {ready("True", "Ready"): "1", SERVING: "0"},
    "nobody runs, nothing waits": {**EMPTY_QUEUE, f"pd_operator_scaling_max_queue_seconds{{{ONE},{POD}}}": "5"},
    "no handoff waits": {INPUT % ("decode", "wait_budget"): "2"},
    "prefill is short, decode at its bound": {
        f'pd_operator_scaling_bottleneck{{{ONE},bottleneck="Decode",{POD}}}': "0",
        LIMITED % "MaxReplicas": "1",
    },
    "the queue of an idle decode": {SOURCE % "local_compute": "7", SOURCE % "external_kv_transfer": "900"},
    "two pods, one leads": {LEADER: "0", LEADER.replace("op-0", "op-1"): "1"},
}


def values(text: str, until: int = 60) -> str:
    """A value held, or its growth, in promtool's notation; afterwards the series is gone (its last scrape left a marker)."""
    if "x" in text:
        return text
    return (f"0{text}x{until}" if text.startswith("+") else f"{text}x{until}") + ("" if until >= 60 else " stale")


def series(given: dict[str, str], until: int = 60) -> list[dict[str, str]]:
    leads = {} if LEADER in given else {LEADER: "1"}
    found = [{"series": name, "values": values(text, until)} for name, text in given.items()]
    return found + [{"series": name, "values": values(text)} for name, text in leads.items()]


def firing(minute: int, *labels: str) -> dict[str, Any]:
    """Exactly these alerts fire at a minute, whatever their severity."""
    expression = 'max without (severity, alertstate) (ALERTS{alertstate="firing"})'
    return {"expr": expression, "eval_time": f"{minute}m", "exp_samples": [{"labels": text, "value": 1} for text in labels]}


def test(name: str, given: list[dict[str, str]], *expected: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "interval": "1m", "input_series": given, "promql_expr_test": list(expected)}


test.__test__ = False  # type: ignore[attr-defined]


def promtool(folder: Path, *tests: dict[str, Any]) -> None:
    """`promtool test rules`, with one run for all."""
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(FILE)], "evaluation_interval": "1m", "tests": list(tests)}))
    done = subprocess.run([str(tool("promtool")), "test", "rules", str(file)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_fires_on_its_symptom_and_not_before_its_time(tmp_path: Path) -> None:
    wanted = [
        test(case.alert, series(case.sick), firing(case.after - 1), firing(case.after + 2, case.labels % case.alert))
        for case in [*CASES, COUNTED]
    ]
    served = test(
        "PDNoServingSlice",
        series({SERVING: "1x10 0x50"}),
        firing(12),
        firing(14, '{alertname="PDNoServingSlice",namespace="team",name="chat"}'),
    )
    promtool(tmp_path, *wanted, served)
    assert {case.alert for case in CASES} | {"PDNoServingSlice"} == {rule["alert"] for rule in RULES}


def test_none_fires_when_all_is_well(tmp_path: Path) -> None:
    given = {**{c.alert: c.well for c in CASES}, "counted": COUNTED.well, **QUIET}
    promtool(tmp_path, *(test(name, series(one), firing(20), firing(40), firing(60)) for name, one in given.items()))


def test_series_that_vanish_end_an_alert_and_those_of_the_operator_raise_one(tmp_path: Path) -> None:
    """After 20 minutes the operator is gone with all that it says: then PDOperatorDown is the one. Engines' series alone: none."""
    down = '{alertname="PDOperatorDown",namespace="pd-operator"}'
    wanted = []
    for case in CASES:
        if case.alert == "PDOperatorDown":
            continue
        ours = not case.alert.startswith("PDFallback")
        given = [{"series": n, "values": values(v, 20)} for n, v in {**case.sick, **({LEADER: "1"} if ours else {})}.items()]
        given += [] if ours else [{"series": LEADER, "values": values("1")}]
        wanted.append(test(case.alert, given, firing(19, case.labels % case.alert), firing(40, *([down] if ours else []))))
    nothing = test("no series at all", [{"series": "up", "values": "1x60"}], firing(4), firing(6, down))
    promtool(tmp_path, *wanted, nothing)


def test_annotations_say_whose_it_is(tmp_path: Path) -> None:
    rule = next(r for r in RULES if r["alert"] == "PDFallbackRecompute")
    case = next(c for c in CASES if c.alert == "PDFallbackRecompute")
    annotations = {
        "summary": "Decode of team/chat computes prompts itself.",
        "description": "10% of the prompts on decode were computed there and not handed over, within 10 minutes.",
        "runbook_url": rule["annotations"]["runbook_url"],
    }
    labels = {"severity": "warning", "namespace": "team", "name": "chat"}
    expected = {"alertname": case.alert, "eval_time": "20m", "exp_alerts": [{"exp_labels": labels, "exp_annotations": annotations}]}
    promtool(tmp_path, test(case.alert, series(case.sick)) | {"alert_rule_test": [expected]})


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_each_has_a_page_and_reads_metrics_that_exist(rule: dict[str, Any]) -> None:
    page = RUNBOOKS / f"{rule['alert']}.md"
    assert rule["annotations"]["runbook_url"] == str(page.relative_to(generated.ROOT))
    text = page.read_text()
    assert text.startswith(f"# {rule['alert']}\n") and re.findall(r"^## (.*)$", text, re.M) == ["What it means", "Look", "Do"]
    assert rule["labels"]["severity"] in ("warning", "critical") and re.fullmatch(r"\d+m", rule["for"])
    assert names(rule["expr"]) <= known(), rule["expr"]
    overview = (generated.ROOT / "docs/operations/monitoring.md").read_text()
    assert f"| [{rule['alert']}](runbooks/{rule['alert']}.md) | {rule['labels']['severity']} | {rule['for']} |" in overview


def test_pages_and_dashboards_name_metrics_that_exist() -> None:
    texts = [*RUNBOOKS.glob("*.md"), *(CHART / "files" / "dashboards").glob("*.json")]
    assert len(texts) == len(RULES) + 2
    for file in texts:
        assert names(file.read_text()) <= known(), file.name


def test_pages_and_alerts_are_the_same_set() -> None:
    assert {page.stem for page in RUNBOOKS.glob("*.md")} == {rule["alert"] for rule in RULES}


def names(expression: str) -> set[str]:
    """Metrics of an expression."""
    return set(re.findall(r"\b(?:pd_operator_|vllm:|pdserve:|lmcache_mp_|smg_)[a-zA-Z0-9_:]*[a-zA-Z0-9]", expression))


def known() -> set[str]:
    """What can be asked for: ours, and what stands in the tables of the programs."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    ours = {f"{m.name}{suffix}" for m in families() for suffix in suffixes[m.type]}
    tables = [table for program in catalog.PROGRAMS if (table := catalog.table(program, "")) is not None]
    recorded = {promql.PODS, *(promql.rule_name(quantity) for quantity, _ in catalog.union())}
    return ours | recorded | set(signals_vllm.SHOWN) | {n for table in tables for one in table.series.values() for n in one.names}
