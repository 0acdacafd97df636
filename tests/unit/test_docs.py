"""The documents: links, examples, commands and numbers agree with the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import generated
from pd_operator.api.conditions import REASONS, Reason, Type
from pd_operator.api.types import PDDeploymentSpec
from pd_operator.controller.reconcile import RECHECK
from pd_operator.controller.scaling import TICK
from pd_operator.core import names
from pd_operator.core.compatibility import MAX_BACKENDS, review
from pd_operator.core.observed import LOST_AFTER
from pd_operator.core.placement.demand import BACKOFF, BACKOFF_MAX
from pd_operator.core.placing import MAX_AVOIDED
from pd_operator.core.revision import class_of
from pd_operator.core.rollout import PATIENCE
from pd_operator.core.scaling.law import DEFAULT
from pd_operator.core.traffic import BOUND, LEAST, TICKS
from pd_operator.core.weights import BAND
from pd_operator.kube.reflector import ABSENT_RECHECK
from pd_operator.render import group
from pd_operator.settings import Settings
from pd_operator.upstream import catalog, lmcache, smg, vllm, vllm_router
from plugins.quickstart import blocks

ROOT = generated.ROOT
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "charts/pd-operator/README.md"])
EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.yaml"))
MINIMAL: dict[str, Any] = {
    "model": {"uri": "hf://meta-llama/Llama-3.1-8B-Instruct"},
    "engine": {"type": "vllm", "version": "0.32.0"},
    "prefill": {"resources": {"limits": {"nvidia.com/gpu": 1}}},
    "decode": {"resources": {"limits": {"nvidia.com/gpu": 1}}},
}


def anchors(document: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (document.parent / path).resolve() if path else document
        assert there.exists(), f"{target} does not exist"
        if anchor:
            assert anchor in anchors(there), f"{target}: no such heading"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_accepted(example: Path) -> None:
    document = yaml.safe_load(example.read_text())
    spec = PDDeploymentSpec.model_validate(document["spec"])
    images = {"engine": "example", "router": "example", "lmcache": "example", "canary": "example"}
    assert review(spec, catalog.upstream(spec), images) == []


def test_the_first_example_is_the_minimal_object_with_a_cache() -> None:
    document = yaml.safe_load((ROOT / "docs/examples/chat.yaml").read_text())
    assert document["metadata"] == {"name": "chat"}
    assert document["spec"] == {**MINIMAL, "lmcache": {"l1Size": "1Gi"}}
    shown = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert shown is not None
    assert yaml.safe_load(shown[1])["spec"] == {**MINIMAL, "lmcache": {}}


def test_quickstart_commands_are_shell() -> None:
    found = blocks()
    assert found[0] == "make demo\n" and found[-1] == "make demo-down\n"
    for block in found:
        done = subprocess.run(["bash", "-n", "-c", block], capture_output=True, text=True, timeout=10)
        assert done.returncode == 0, done.stderr


def test_labels_page_has_every_label() -> None:
    text = (ROOT / "docs/reference/labels.md").read_text()
    for label in (
        names.MANAGED_BY,
        names.COMPONENT,
        names.DEPLOYMENT,
        names.SLICE,
        names.REVISION,
        names.ROLE,
        names.WORKER,
        names.FRONT,
    ):
        assert f"`{label}`" in text
    for label in (names.LLMD_ROLE, names.APPLIED_HASH, names.SITE, *(f"{k}: {v}" for k, v in smg.ENGINE_ANNOTATIONS.items())):
        assert f"`{label}`" in text


def test_the_table_of_classes_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| ([ABC]), .*?\| (.*?) \|", (ROOT / "docs/how-it-works.md").read_text(), flags=re.M)
    assert [letter for letter, _ in rows] == ["A", "B", "C"]
    for letter, fields in rows:
        for field in re.findall(r"`(.+?)`", fields):
            assert class_of(field) == letter, field


def test_the_page_has_the_rollouts_patience() -> None:
    assert f"unschedulable for {PATIENCE:.0f} s" in " ".join((ROOT / "docs/how-it-works.md").read_text().split())


def test_readme_names_the_tested_versions() -> None:
    text = (ROOT / "README.md").read_text()
    for version in (vllm.TESTED, lmcache.TESTED, smg.TESTED, vllm_router.TESTED):
        assert version in text


def test_readme_says_of_each_unbuilt_feature_that_it_is_not_built() -> None:
    """What the operator refuses with NotImplemented has its row, and nothing that has a row is accepted."""
    text = (ROOT / "README.md").read_text()
    unbuilt: dict[str, dict[str, Any]] = {
        "SGLang": {"engine": {"type": "sglang", "version": "0.5.0"}},
    }
    for mark, change in unbuilt.items():
        spec = PDDeploymentSpec.model_validate({**MINIMAL, **change})
        reasons = {
            refusal.reason
            for refusal in review(spec, catalog.upstream(spec), {"engine": "e", "router": "r", "lmcache": "l", "canary": "c"})
        }
        assert Reason.NOT_IMPLEMENTED in reasons, mark
        (row,) = [line for line in text.splitlines() if line.startswith("|") and mark in line]
        assert "not built" in row


def test_placement_page_has_the_numbers_of_the_code() -> None:
    text = " ".join((ROOT / "docs/placement.md").read_text().split())
    assert f"{BACKOFF.seconds // 60} minutes, doubled each time, at most {BACKOFF_MAX.seconds // 3600} hours" in text
    assert f"gone {LOST_AFTER / 60:.0f} minutes after their grace period" in text
    assert f"More than {MAX_AVOIDED} such nodes" in " ".join((ROOT / "docs/adr/0010-placement.md").read_text().split())
    (shown,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/placement.md").read_text(), flags=re.S)
    spec = PDDeploymentSpec.model_validate({**MINIMAL, **yaml.safe_load(shown)["spec"]})
    assert review(spec, catalog.upstream(spec), {"engine": "e", "router": "r", "lmcache": "l", "canary": "c"}) == []
    placed = {reason for reason, doc in REASONS.items() if Type.PLACED in doc.conditions} - {Reason.STARTING, Reason.SUSPENDED}
    assert {r for r in placed if f", {r} |" in text} == placed


def test_front_door_page_has_the_numbers_of_the_code() -> None:
    text = " ".join((ROOT / "docs/front-door.md").read_text().split())
    assert f"more than {BOUND} points off in {TICKS} looks in a row" in text and f"{TICKS} looks in a row that are" in text
    assert f"every {TICK:.0f} s" in text and f"Less than {LEAST:g} requests per second" in text
    assert f"more than {BAND} points off" in text and f"at most {MAX_BACKENDS} slices" in text
    assert f"looks every {ABSENT_RECHECK:.0f} s" in text and ABSENT_RECHECK == RECHECK
    (shown,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/front-door.md").read_text(), flags=re.S)
    spec = PDDeploymentSpec.model_validate({**MINIMAL, **yaml.safe_load(shown)["spec"]})
    assert review(spec, catalog.upstream(spec), {"engine": "e", "router": "r", "lmcache": "l", "canary": "c"}) == []
    for reason in (Reason.MISSING_KIND, Reason.ROUTE_REFUSED, Reason.WEIGHTS_NOT_ENFORCEABLE, Reason.UNEVEN_TRAFFIC):
        assert f", {reason} |" in text


def test_nodes_page_has_the_example_and_the_names_of_the_code() -> None:
    text = (ROOT / "docs/nodes.md").read_text()
    (shown,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.S)
    role = yaml.safe_load(shown)["spec"]["decode"]
    spec = PDDeploymentSpec.model_validate(
        {**MINIMAL, "decode": role, "prefill": {**MINIMAL["prefill"], "parallelism": {"tensor": 8}}}
    )
    assert review(spec, catalog.upstream(spec), {"engine": "e", "router": "r", "lmcache": "l", "canary": "c"}) == []
    assert group.API_VERSION in text and names.WORKER in text and group.GROUP_KEY.split("/")[0] in text
    assert ".".join(map(str, group.APART_SINCE)) in text
    go = (ROOT / "tests/cluster/tools/lws/go.mod").read_text()
    (tested,) = re.findall(r"sigs.k8s.io/lws v(\S+)", go)
    assert f"{tested} is the tested version" in text


def test_scaling_page_has_the_reasons_and_numbers_of_the_code() -> None:
    text = (ROOT / "docs/scaling.md").read_text()
    example, shared = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, flags=re.S))
    spec = PDDeploymentSpec.model_validate({**MINIMAL, **example["spec"]})
    assert review(spec, catalog.upstream(spec), {"engine": "e", "router": "r", "lmcache": "l", "canary": "c"}) == []
    (budget,) = Settings.model_validate(shared).budgets
    assert (budget.namespaces, budget.max_gpus) == (("team-a", "team-b"), 64)
    code = (ROOT / "operator/pd_operator/core/pool_status.py").read_text()
    active = {*re.findall(r'type_, "(?:True|False)", "(\w+)"', code), "NoSeries", "SignalsUnknown"} - {"AsExpected", "NoCapacity"}
    assert {reason for reason in active if re.search(rf"^\| (?:True|False), {reason} \|", text, flags=re.M)} == active
    for reason in ("MaxReplicas", "MinReplicas", "MaxGPUs", "NoCapacity", "GatedByDecode", "Cooldown"):
        assert re.search(rf"^\| [\w, ]*\b{reason}\b[\w, ]* \|", text, flags=re.M), reason
    assert DEFAULT.down_window == 300 and DEFAULT.down_interval == 60 and TICK == 15  # five minutes, a minute, every 15 s


def test_drain_page_has_the_numbers_of_the_code() -> None:
    text = (ROOT / "docs/operations/drain.md").read_text()
    assert f"sleeps {vllm.PRE_STOP} s" in text and vllm.PRE_STOP == vllm.DISCOVERY_LAG + 5
    assert f"and {vllm.LEASE_MARGIN} s" in text
    assert f"a margin of {vllm.GRACE_MARGIN} s" in text
    assert f"up to {smg.SHUTDOWN_GRACE} s" in text
    default = PDDeploymentSpec.model_validate(MINIMAL).rollout.drain_timeout
    assert f"({int(default.removesuffix('s'))} s by default)" in text


def test_security_page_has_the_ports_of_the_code() -> None:
    text = (ROOT / "docs/operations/security.md").read_text()
    assert f"| {vllm.PORT}, " in text and f"| {lmcache.HTTP_PORT}, " in text and f"({lmcache.DATA_PORT})" in text


def test_chart_readme_has_every_value() -> None:
    text = (ROOT / "charts/pd-operator/README.md").read_text()
    values = yaml.safe_load((ROOT / "charts/pd-operator/values.yaml").read_text())

    def leaves(value: Any, path: str) -> list[str]:
        if isinstance(value, dict) and value and path != "resources":
            return [leaf for key, item in value.items() for leaf in leaves(item, f"{path}.{key}".lstrip("."))]
        return [path]

    for path in leaves(values, ""):
        assert f"`{path}`" in text, path


def test_every_decision_is_in_the_list_and_the_menu() -> None:
    overview = (ROOT / "docs/adr/README.md").read_text()
    menu = (ROOT / "mkdocs.yml").read_text()
    numbers = []
    for page in sorted((ROOT / "docs/adr").glob("0*.md")):
        assert f"({page.name})" in overview and f"adr/{page.name}" in menu
        numbers.append(int(page.name[:4]))
        assert page.read_text().startswith(f"# {page.name[:4]}: ")
    assert numbers == list(range(1, len(numbers) + 1))


def test_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, timeout=120, env={"NO_MKDOCS_2_WARNING": "1", "PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "quickstart" / "index.html").is_file()
