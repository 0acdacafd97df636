"""The queries as text: identity by labels only, scope, names of several versions, and the rule file of the chart."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.tools import tool
from pd_operator.core import names
from pd_operator.signals import answers, roll
from pd_operator.upstream import signals_catalog as catalog
from pd_operator.upstream import signals_labels as labels
from pd_operator.upstream import signals_promql as promql
from pd_operator.upstream.signals_table import How, Kind, Quantity, Series, Table

ROOT = Path(__file__).parents[2]
RULES = ROOT / "charts" / "pd-operator" / "files" / "rules" / "signals.yaml"
ALL = promql.Expressions(labels.matchers((), {}))


def texts(expressions: promql.Expressions = ALL) -> dict[str, str]:
    """Every query of a tick."""
    return {q.name: q.expression for q in answers.queries(expressions, {95})}


def test_labels_are_those_that_the_prometheus_operator_makes_of_ours() -> None:
    assert labels.DEPLOYMENT == "pdserve_dev_deployment"
    assert [labels.sanitized(name) for name in labels.POD_TARGET_LABELS] == [labels.DEPLOYMENT, labels.SLICE, labels.ROLE]
    assert labels.POD_TARGET_LABELS == (names.DEPLOYMENT, names.SLICE, names.ROLE)


def test_about_twenty_queries_whatever_the_fleet() -> None:
    assert len(texts()) == 23
    assert len(answers.queries(ALL, {95, 99})) == 24


def test_no_query_knows_a_model_and_each_asks_for_our_labels() -> None:
    for name, text in texts().items():
        assert "model" not in text, name
        selectors = re.findall(r"\{([^}]*)\}", text)
        assert selectors
        assert all('pdserve_dev_deployment!=""' in selector for selector in selectors), name


def test_scope() -> None:
    scoped = promql.Expressions(labels.matchers(("team-b", "a.b"), {"cluster": 'x"y'}))
    for name, text in texts(scoped).items():
        for selector in re.findall(r"\{([^}]*)\}", text):
            assert 'namespace=~"a\\\\.b|team-b"' in selector, name
            assert 'cluster="x\\"y"' in selector, name


@pytest.mark.parametrize("name", ["namespace", "pdserve_dev_role", "pod", "a-b", ""])
def test_matchers_that_the_contract_owns_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"signals\.prometheus\.matchers: .* accepted is a label name other than namespace"):
        labels.matchers((), {name: "x"})


def test_ages_are_of_bare_selectors() -> None:
    """timestamp() of an expression is the time of the query."""
    for text in texts().values():
        for inner in re.findall(r"timestamp\(([^()]*)\)", text):
            assert re.fullmatch(r"[a-z_:]+\{[^{}]*\}", inner)


def test_a_renamed_series_is_asked_for_under_both_names() -> None:
    quantity = Quantity("q", How.RATE, "s", "decode")
    table = Table("p", {"s": Series(Kind.COUNTER, ("new_total", "old_total"))}, (quantity,), (), "")
    text = ALL.quantity(quantity, [table])
    assert re.findall(r"rate\((\w+)", text) == ["new_total", "old_total"]
    assert " or " in text
    assert text.count('pdserve_dev_role="decode"') == 2


def test_recorded_queries_read_the_rules() -> None:
    recorded = promql.Expressions(labels.matchers(("team",), {}), recorded=True)
    rules = {rule["record"] for rule in _rules()}
    for query in answers.queries(recorded, {95}):
        name = query.expression.partition("{")[0]
        assert name in rules, query.name
    assert "histogram_quantile(0.5," in {q.name: q.expression for q in answers.queries(recorded, {50})}["first_token_quantile/50"]


def _rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_the_chart_s_rules_are_the_tables_expressions() -> None:
    assert yaml.safe_load(RULES.read_text()) == promql.rules(), "python -m pd_operator.signals.rules > the file"
    assert len({rule["record"] for rule in _rules()}) == len(_rules()) == 23


def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(
        [str(tool("promtool")), "check", "rules", "--lint=all", "--lint-fatal", str(RULES)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "23 rules found" in done.stdout


@pytest.mark.parametrize("enabled", [True, False])
def test_the_chart_wraps_the_file_when_asked(enabled: bool) -> None:
    values = [
        "image.repository=localhost/x",
        f"recordingRules.enabled={str(enabled).lower()}",
        "recordingRules.labels.release=mine",
    ]
    argv = [str(tool("helm")), "template", "pd-operator", str(ROOT / "charts" / "pd-operator"), "--skip-schema-validation"]
    done = subprocess.run([*argv, "--set", ",".join(values)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = [d for d in yaml.safe_load_all(done.stdout) if d and d["kind"] == "PrometheusRule"]
    assert [d["spec"] for d in found] == ([promql.rules()] if enabled else [])
    assert all(d["metadata"]["labels"]["release"] == "mine" for d in found)


def test_every_quantity_of_every_program_is_asked_for_once() -> None:
    asked = [quantity.name for quantity, _ in catalog.union()]
    assert len(set(asked)) == len(asked)
    for program in catalog.TICK:
        table = catalog.table(program, "")
        assert table is not None
        assert {q.name for q in table.quantities} <= set(asked)


def test_rendered_pods_keep_the_contract() -> None:
    """Labels and container names of what the operator renders are those by which its queries know a pod."""
    seen: set[tuple[str, str | None]] = set()
    for golden in ("minimal", "p2p", "vllm-router"):
        for document in yaml.safe_load_all((ROOT / "tests" / "golden" / f"{golden}.yaml").read_text()):
            if document["kind"] != "Deployment":
                continue
            template = document["spec"]["template"]
            own = template["metadata"]["labels"]
            assert {names.DEPLOYMENT, names.SLICE} <= set(own)
            seen.add((template["spec"]["containers"][0]["name"], own.get(names.ROLE)))
    engine, router = roll.ENGINE_CONTAINER, roll.ROUTER_CONTAINER
    assert seen == {(engine, "prefill"), (engine, "decode"), (router, None), ("coordinator", None)}
