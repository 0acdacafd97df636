"""What of `nodes` and parallelism vLLM takes, against its own arithmetic, and the command lines of a group."""

from __future__ import annotations

from itertools import product

import pytest
from builders import make_spec

from pd_operator.api.types import Parallelism
from pd_operator.upstream import vllm_nodes


def vllm_takes(tensor: int, data: int, nodes: int) -> bool:
    """vllm 0.32.0 engine/arg_utils.py (inferred data_parallel_size_local), config/parallel.py nnodes_within_dp, and
    v1/executor/multiproc_executor.py _get_parallel_sizes."""
    if tensor * data % nodes:
        return False
    local = max(tensor * data // nodes // tensor, 1)
    of_data = data // local
    return data % local == 0 and nodes % of_data == 0 and tensor % (nodes // of_data) == 0


def test_what_is_accepted_is_what_vllm_starts_with() -> None:
    seen = {True: 0, False: 0}
    for tensor, data, nodes in product(range(1, 9), range(1, 9), range(2, 9)):
        spec = make_spec({"decode": {"nodes": nodes, "parallelism": {"tensor": tensor, "data": data}}})
        accepted = not list(vllm_nodes.refusals(spec))
        assert accepted is vllm_takes(tensor, data, nodes), (tensor, data, nodes)
        seen[accepted] += 1
    assert min(seen.values()) > 50


@pytest.mark.parametrize(
    ("tensor", "data", "nodes", "spans"), [(2, 1, 1, False), (2, 1, 2, True), (2, 2, 2, False), (2, 2, 4, True), (1, 4, 2, False)]
)
def test_whether_a_scheduler_has_ranks_on_several_nodes(tensor: int, data: int, nodes: int, spans: bool) -> None:
    assert vllm_nodes.spans(Parallelism(tensor=tensor, data=data), nodes) is spans


def test_one_node_says_nothing_of_nodes() -> None:
    assert vllm_nodes.arguments(1) == [] and list(vllm_nodes.refusals(make_spec({"engine": {"args": ["-asc", "2"]}}))) == []


def test_a_flag_is_named_by_the_role_that_makes_it_ours() -> None:
    parallelism = {"nodes": 2, "parallelism": {"tensor": 2}}
    spec = make_spec({"prefill": {**parallelism, "args": ["-asc=2"]}, "decode": parallelism})
    (refusal,) = vllm_nodes.refusals(spec)
    assert refusal.message == ("spec.prefill.args=-asc: the operator decides it where spec.prefill.nodes is above 1; remove it")
