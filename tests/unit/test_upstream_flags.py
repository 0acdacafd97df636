"""Defaults of ours that the user may replace, in whatever spelling."""

from __future__ import annotations

import pytest

from pd_operator.upstream.flags import flag_of, with_defaults


@pytest.mark.parametrize(
    ("arg", "flag"),
    [
        ("--policy", "--policy"),
        ("--policy=random", "--policy"),
        ("--max_num_seqs=4", "--max-num-seqs"),
        ("--kv_transfer_config.kv_role=x", "--kv-transfer-config"),
        ("--a.b_c=d.e_f", "--a"),
        ("-tp", "-tp"),
        ("-tp=2", "-tp"),
        ("-O3", "-O3"),
        ("value", ""),
        ("-1", ""),
        ("-0.5", ""),
        ("--1", ""),
        ("a=--b", ""),
        ("", ""),
    ],
)
def test_flag_of(arg: str, flag: str) -> None:
    assert flag_of(arg) == flag


DEFAULTS = [("--policy", "round_robin"), ("--disable-x",), ("--retry-max-retries", "2")]


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ([], ["--policy", "round_robin", "--disable-x", "--retry-max-retries", "2"]),
        (["--policy", "random"], ["--disable-x", "--retry-max-retries", "2", "--policy", "random"]),
        (["--policy=random"], ["--disable-x", "--retry-max-retries", "2", "--policy=random"]),
        (["--retry_max_retries=9"], ["--policy", "round_robin", "--disable-x", "--retry_max_retries=9"]),
        (["--disable-x"], ["--policy", "round_robin", "--retry-max-retries", "2", "--disable-x"]),
        (["--other", "policy"], ["--policy", "round_robin", "--disable-x", "--retry-max-retries", "2", "--other", "policy"]),
    ],
)
def test_with_defaults(user: list[str], expected: list[str]) -> None:
    assert with_defaults(DEFAULTS, user) == expected


def test_the_users_arguments_keep_their_order_and_come_last() -> None:
    user = ["--b", "2", "--a", "1", "--b", "3"]
    assert with_defaults(DEFAULTS, user)[-6:] == user
