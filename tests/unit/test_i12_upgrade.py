"""I12: an operator upgrade ends no engine pod: stored templates are used, UpdateAvailable tells, restartID adopts."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import builders
import pytest
from builders import by_name, make_snapshot, manifests, stored

from pd_operator.core.names import ROLES, Role
from pd_operator.core.plan import make_plan
from pd_operator.core.snapshot import Install, Snapshot, StoredRevision
from pd_operator.render import engine
from pd_operator.render.bundle import Bundle, render

ORIGINAL = engine.pod_template


def newer(snapshot: Snapshot, role: Role, revision: str) -> dict[str, Any]:
    """How the next version of the operator renders."""
    template = copy.deepcopy(ORIGINAL(snapshot, role, revision))
    template["spec"]["terminationGracePeriodSeconds"] += 1
    return template


def run(changes: dict[str, Any] | None = None, revisions: tuple[StoredRevision, ...] = (), **fields: Any) -> Bundle:
    snapshot = make_snapshot(changes, revisions=revisions, **fields)
    return render(snapshot, make_plan(snapshot))


def templates(bundle: Bundle) -> dict[str, Any]:
    """Role -> pod template of its Deployment."""
    return {
        d["metadata"]["labels"]["pdserve.dev/role"]: d["spec"]["template"]
        for d in manifests(bundle, "Deployment")
        if "pdserve.dev/role" in d["metadata"]["labels"]
    }


def revisions_of(bundle: Bundle) -> list[dict[str, Any]]:
    return list(manifests(bundle, "ControllerRevision"))


@pytest.fixture
def before() -> StoredRevision:
    """What the version before left behind."""
    return stored(revisions_of(run())[0])


@pytest.fixture
def upgraded(before: StoredRevision, monkeypatch: pytest.MonkeyPatch) -> StoredRevision:
    """The same, once the operator renders differently."""
    monkeypatch.setattr(engine, "pod_template", newer)
    return before


def test_the_first_pass_stores_what_it_renders() -> None:
    bundle = run()
    (revision,) = revisions_of(bundle)
    assert bundle.stages[0][0] == revision  # in the first stage: after a crash the next pass finds the same templates
    assert revision["data"]["templates"] == templates(bundle)
    assert revision["data"]["pairing"] == builders.revision_of() and revision["revision"] == 1
    assert revision["data"]["spec"] == builders.MINIMAL
    assert not bundle.renderer_changed


def test_the_second_pass_uses_what_is_stored(before: StoredRevision) -> None:
    bundle = run(revisions=(before,))
    assert revisions_of(bundle) == [] and not bundle.renderer_changed
    assert templates(bundle) == before.templates


def test_an_upgrade_changes_no_engine_template(upgraded: StoredRevision) -> None:
    bundle = run(revisions=(upgraded,))
    assert templates(bundle) == upgraded.templates
    assert bundle.renderer_changed and revisions_of(bundle) == []


def test_a_live_edit_after_an_upgrade_changes_no_engine_template(upgraded: StoredRevision) -> None:
    changes = {"prefill": {"replicas": 3}, "router": {"args": ["--policy=random"]}, "rollout": {"type": "Recreate"}}
    bundle = run(changes, revisions=(upgraded,))
    assert templates(bundle) == upgraded.templates


def test_restart_id_adopts(upgraded: StoredRevision) -> None:
    bundle = run({"rollout": {"restartID": "now"}}, revisions=(upgraded,))
    assert not bundle.renderer_changed
    (revision,) = revisions_of(bundle)
    assert revision["revision"] == 2 and revision["data"]["pairing"] != upgraded.pairing
    for role in ROLES:
        grace = upgraded.templates[role]["spec"]["terminationGracePeriodSeconds"]
        assert templates(bundle)[role]["spec"]["terminationGracePeriodSeconds"] == grace + 1


def test_an_edit_of_one_role_after_an_upgrade_leaves_the_other_alone(upgraded: StoredRevision) -> None:
    edit = {"prefill": {"template": {"spec": {"priorityClassName": "high"}}}}
    bundle = run(edit, revisions=(upgraded,))
    found = templates(bundle)
    assert found["decode"] == upgraded.templates["decode"]
    assert found["prefill"]["spec"]["priorityClassName"] == "high"
    (revision,) = revisions_of(bundle)
    assert revision["data"]["templates"] == found and revision["revision"] == 2
    assert revision["metadata"]["name"] != upgraded.name and revision["data"]["pairing"] == upgraded.pairing
    again = run(edit, revisions=(upgraded, stored(revision)))
    assert templates(again) == found and again.renderer_changed  # decode still has the old renderer's


def test_back_to_an_older_shape_finds_its_templates(upgraded: StoredRevision) -> None:
    edit = {"prefill": {"template": {"spec": {"priorityClassName": "high"}}}}
    second = stored(revisions_of(run(edit, revisions=(upgraded,)))[0])
    bundle = run({}, revisions=(upgraded, second))
    assert templates(bundle) == upgraded.templates and revisions_of(bundle) == []


def test_a_lost_revision_is_made_again(upgraded: StoredRevision) -> None:
    """Somebody deleted it: nothing is left of the old renderer, and numbers go on from what is there."""
    other = replace(upgraded, name="chat-0badcafe-000000", pairing="0badcafe", number=7)
    (revision,) = revisions_of(run(revisions=(other,)))
    assert revision["revision"] == 8


INSTALLS: dict[str, dict[str, Any]] = {
    "image table": {"images": {"engine": "mirror.example.org/vllm:1", "router": "r", "lmcache": ""}},
    "pull policy": {"install": Install(pull_policy="Always")},
}


@pytest.mark.parametrize("fields", INSTALLS.values(), ids=INSTALLS)
def test_settings_of_the_install_change_no_engine_template(before: StoredRevision, fields: dict[str, Any]) -> None:
    bundle = run(revisions=(before,), **fields)
    assert templates(bundle) == before.templates and bundle.renderer_changed


def test_the_stored_template_is_what_the_server_gives_back(before: StoredRevision) -> None:
    """It went through JSON once; equality must not depend on tuples or numbers that JSON does not have."""
    import json

    read = replace(before, templates=json.loads(json.dumps(before.templates)))
    bundle = run(revisions=(read,))
    assert not bundle.renderer_changed


def test_a_live_edit_does_not_hide_that_the_renderer_changed(upgraded: StoredRevision) -> None:
    assert run({"router": {"replicas": 3}}, revisions=(upgraded,)).renderer_changed


def test_no_live_field_reaches_an_engine_template(before: StoredRevision) -> None:
    """Else an edit of it would be kept from the pods and blamed on the renderer."""
    bundle = run(
        {"router": {"type": "vllm-router", "replicas": 5}, "rollout": {"type": "Recreate"}, "suspend": True}, revisions=(before,)
    )
    assert templates(bundle) == before.templates and not bundle.renderer_changed


def test_deployments_name_the_revision_of_their_templates(before: StoredRevision) -> None:
    for (kind, name), manifest in by_name(run(revisions=(before,))).items():
        if kind == "Deployment":
            assert manifest["metadata"]["labels"]["pdserve.dev/revision"] == before.pairing, name
