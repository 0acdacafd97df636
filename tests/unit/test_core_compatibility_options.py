"""Flags and variables as an engine gets them: which setting wins, in every spelling."""

from __future__ import annotations

from typing import Any

import pytest
from builders import containers, make_spec, pod_specs, rendered
from hypothesis import given
from hypothesis import strategies as st

from pd_operator.core.compatibility_options import MAX_SHOWN, Option, Options, options
from pd_operator.core.names import ROLES


def of(*args: str, role: str = "decode", **changes: Any) -> Options:
    return options(make_spec({"engine": {"args": list(args)}, **changes}), role)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "value"),
    [
        (["--block-size=32"], 32),
        (["--block-size", "32"], 32),
        (["--block_size", "32"], 32),
        (["--block_size=32"], 32),
        (["--block-size=16", "--seed", "1", "--block-size=32"], 32),
        (["--block-size=16", "--block-size"], None),
        (["--block-size=many"], None),
        (["--block-size=-1"], None),
        (["--other=32"], None),
        (["32", "--x"], None),
        ([], None),
    ],
)
def test_numbers(args: list[str], value: int | None) -> None:
    assert of(*args).number("--block-size") == value


def test_a_negative_number_is_a_value_and_no_flag() -> None:
    found = of("--max-model-len", "-1", "--seed=2")
    assert [(o.name, o.value) for o in found.flags] == [("--max-model-len", "-1"), ("--seed", "2")]


def test_the_role_wins_over_the_engine_and_names_its_field() -> None:
    spec = make_spec({"engine": {"args": ["--dtype=a"]}, "decode": {"args": ["--dtype=b"]}})
    assert options(spec, "prefill").flag("--dtype") == Option("--dtype", "a", "spec.engine.args")
    assert options(spec, "decode").flag("--dtype") == Option("--dtype", "b", "spec.decode.args")


@pytest.mark.parametrize(
    ("args", "on"),
    [
        ([], None),
        (["--x"], True),
        (["--x=true"], True),
        (["--x=False"], False),
        (["--no-x"], False),
        (["--x", "--no-x"], False),
        (["--no-x", "--x"], True),
    ],
)
def test_switches(args: list[str], on: bool | None) -> None:
    assert of(*args).on("--x") is on


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (['--c={"method":"mtp"}'], {"method": "mtp"}),
        (["--c", '{"method":"mtp"}'], {"method": "mtp"}),
        (["--c.method=mtp", "--c.tokens", "3"], {"method": "mtp", "tokens": 3}),
        (['--c={"method":"a","n":1}', "--c.method", "b"], {"method": "b", "n": 1}),
        (["--c.method=a", '--c={"n":1}'], {"n": 1}),
        (["--c=not json"], {}),
        (["--c=[1]"], {}),
        (["--c", "{"], {}),
        ([], {}),
    ],
)
def test_json_flags(args: list[str], found: dict[str, Any]) -> None:
    assert of(*args).nested("--c") == found


def test_a_dotted_path_keeps_its_underscores() -> None:
    assert of("--spec_config.draft_model=x").flags[0].name == "--spec-config.draft_model"


def test_long_values_are_cut_where_they_are_shown() -> None:
    option = of("--hf-overrides=" + "x" * 500).flag("--hf-overrides")
    assert option is not None and len(option.value) == 500
    assert option.shown == "--hf-overrides=" + "x" * MAX_SHOWN


def env(name: str, value: str | None = None) -> dict[str, Any]:
    return {"name": name, "value": value} if value is not None else {"name": name, "valueFrom": {"fieldRef": {"fieldPath": "a"}}}


def test_variables_in_the_order_in_which_they_win() -> None:
    """Engine, role, the engine container of the role's template; rendered pods agree."""
    template = {
        "spec": {"containers": [{"name": "engine", "env": [env("C", "3")]}, {"name": "mine", "image": "i", "env": [env("D", "4")]}]}
    }
    changes = {
        "engine": {"env": [env("A", "1"), env("B", "1"), env("C", "1")]},
        "decode": {"env": [env("B", "2"), env("C", "2")], "template": template},
    }
    spec = make_spec(changes)
    _, _, bundle = rendered(changes)
    for role in ROLES:
        found = options(spec, role)
        pod = next(t for name, t in pod_specs(bundle).items() if name.endswith(role))
        live = {e["name"]: e.get("value") for e in containers(pod)["engine"]["env"]}
        assert {n: live[n] for n in ("A", "B", "C")} == {n: found.variable(n) for n in ("A", "B", "C")}
        assert "D" not in found.variables
    assert options(spec, "decode").variables["C"].field == "spec.decode.template.spec.containers[engine].env"
    assert options(spec, "decode").variables["A"].field == "spec.engine.env"


def test_a_variable_from_elsewhere_has_no_value() -> None:
    spec = make_spec({"engine": {"env": [env("A")]}})
    assert options(spec, "prefill").variable("A") == "" and "A" in options(spec, "prefill").variables


@pytest.mark.parametrize(
    "template",
    [
        {},
        {"spec": 1},
        {"spec": {"containers": 1}},
        {"spec": {"containers": [1]}},
        {"spec": {"containers": [{"name": "engine", "env": 1}]}},
    ],
)
def test_a_malformed_template_is_refused_elsewhere(template: dict[str, Any]) -> None:
    assert options(make_spec({"decode": {"template": template}}), "decode").variables == {}


@given(st.lists(st.sampled_from(["--a=1", "--a", "1", "--no-a", "-b", "--a_b.c", "{}", "--=", "-", "--", "=", "-1"]), max_size=8))
def test_any_list_of_arguments_is_read(args: list[str]) -> None:
    found = of(*args)
    assert len(found.flags) == sum(1 for a in args if a.startswith("-") and not a.lstrip("-")[:1].isdigit())
    assert found.on("--a") in (None, True, False)
