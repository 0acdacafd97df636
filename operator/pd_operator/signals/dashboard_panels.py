"""What the two dashboards show: rows of panels with their queries. `dashboards` makes Grafana's JSON of them.

Queries read the operator's own metrics, the recording rules of the chart, and series that stand in upstream's tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pd_operator.upstream import signals_labels as labels

Query = tuple[str, str]  # expression, legend


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `columns` of 24 in a line; `unit` as Grafana names them."""

    title: str
    kind: str  # stat, timeseries, table
    queries: tuple[Query, ...]
    unit: str = "short"
    columns: int = 8
    text: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A heading and its panels."""

    title: str
    panels: tuple[Panel, ...]


READY: Final = 'pd_operator_pddeployment_condition{type="Ready"'
_FLEET: Final = 'namespace=~"$namespace"'
_ONE: Final = 'namespace="$namespace",name="$name"'
_PODS: Final = f'namespace="$namespace",{labels.DEPLOYMENT}="$name"'
_SOURCES: Final = f'vllm:prompt_tokens_by_source_total{{{_PODS},{labels.ROLE}="decode"}}'


def _series(title: str, *queries: Query, unit: str = "short", text: str = "", columns: int = 8) -> Panel:
    return Panel(title, "timeseries", queries, unit, columns, text)


def _stat(title: str, expression: str, unit: str = "short") -> Panel:
    return Panel(title, "stat", ((expression, ""),), unit, 4)


FLEET: Final = (
    Row(
        "Fleet",
        (
            _stat("PDDeployments", f"count(max by (namespace, name) ({READY},{_FLEET}}}))"),
            _stat("Ready", f'count(max by (namespace, name) ({READY},status="True",{_FLEET}}})) or vector(0)'),
            _stat("Serving slices", f"sum(max by (namespace, name) (pd_operator_pddeployment_serving_slices{{{_FLEET}}}))"),
            _stat("GPUs held", f"sum(max by (namespace, name, role) (pd_operator_pddeployment_gpus{{{_FLEET}}}))"),
            _stat(
                "Pools without signals",
                'sum(pd_operator_pdpool_condition{type="ScalingActive",status="False",'
                f'reason=~"SignalsUnknown|NoSeries|NotScraped",{_FLEET}}}) or vector(0)',
            ),
            _stat("Operator leads", "max(pd_operator_leader)"),
            Panel(
                "Ready, by object",
                "table",
                ((f"max by (namespace, name, status, reason) ({READY},{_FLEET}}})", ""),),
                columns=12,
                text="The reason is that of the first condition that stands in the way.",
            ),
            _series(
                "Ready replicas",
                (f'sum by (role) (pd_operator_pddeployment_replicas{{state="ready",{_FLEET}}})', "{{role}}"),
                columns=12,
            ),
        ),
    ),
    Row(
        "Scaling",
        (
            _series("Bottleneck", (f"sum by (bottleneck) (pd_operator_scaling_bottleneck{{{_FLEET}}})", "{{bottleneck}}")),
            _series(
                "Needed and asked for",
                (f"sum by (role) (pd_operator_scaling_need_replicas{{{_FLEET}}})", "{{role}} needed"),
                (f"sum by (role) (pd_operator_scaling_desired_replicas{{{_FLEET}}})", "{{role}} asked for"),
            ),
            _series("Reasons", (f"sum by (role, reason) (pd_operator_scaling_reason{{{_FLEET}}})", "{{role}} {{reason}}")),
        ),
    ),
    Row(
        "Requests",
        (
            _series("Arriving", (f"sum by (namespace) (pdserve:offered:rate{{{_FLEET}}})", "{{namespace}}"), unit="reqps"),
            _series(
                "In the routers' and prefill's queues",
                (f"sum by (namespace) (pdserve:queue:sum{{{_FLEET}}})", "{{namespace}} routers"),
                (f'sum by (namespace) (pdserve:waiting:sum{{{_FLEET},{labels.ROLE}="prefill"}})', "{{namespace}} prefill"),
            ),
            _series(
                "Output tokens",
                (f"sum by (namespace) (pdserve:output_tokens:rate{{{_FLEET}}})", "{{namespace}}"),
                text="Of requests that ended.",
            ),
        ),
    ),
    Row(
        "Operator",
        (
            _series(
                "Reconciles", ("sum by (result) (rate(pd_operator_reconcile_total[$__rate_interval]))", "{{result}}"), unit="ops"
            ),
            _series(
                "Duration of a reconcile, p99",
                ("histogram_quantile(0.99, sum by (le) (rate(pd_operator_reconcile_seconds_bucket[30m])))", "p99"),
                unit="s",
            ),
            _series(
                "Requests to the API server",
                ("sum by (verb, code) (rate(pd_operator_api_requests_total[$__rate_interval]))", "{{verb}} {{code}}"),
                unit="reqps",
            ),
            _series(
                "Queue of keys",
                ("sum(pd_operator_workqueue_depth)", "waiting"),
                ("sum(pd_operator_workqueue_delayed)", "for their time"),
            ),
            _series(
                "Delays",
                ("max(pd_operator_workqueue_oldest_seconds)", "oldest key"),
                ("max(pd_operator_loop_lag_seconds)", "event loop"),
                ("max(pd_operator_stream_age_seconds)", "watch silent"),
                unit="s",
            ),
            _series(
                "Memory",
                ("process_resident_memory_bytes and on (instance) pd_operator_leader", "{{pod}}"),
                unit="bytes",
            ),
        ),
    ),
)

DEPLOYMENT: Final = (
    Row(
        "State",
        (
            _stat("Serving slices", f"max(pd_operator_pddeployment_serving_slices{{{_ONE}}})"),
            _stat("GPUs held", f"sum(max by (role) (pd_operator_pddeployment_gpus{{{_ONE}}}))"),
            _stat("Arriving", f"sum(pdserve:offered:rate{{{_PODS}}})", "reqps"),
            _stat("Decoding", f'sum(pdserve:running:sum{{{_PODS},{labels.ROLE}="decode"}})'),
            _stat("Pages scraped", f"sum(up{{{_PODS}}})"),
            _stat("Decode congested", f"max(pd_operator_scaling_congested{{{_ONE}}})"),
            Panel(
                "Conditions",
                "table",
                ((f"max by (type, status, reason) (pd_operator_pddeployment_condition{{{_ONE}}})", ""),),
                columns=12,
            ),
            Panel(
                "Conditions of the pools",
                "table",
                ((f"max by (role, type, status, reason) (pd_operator_pdpool_condition{{{_ONE}}})", ""),),
                columns=12,
            ),
        ),
    ),
    Row(
        "Replicas and why",
        (
            _series("Replicas", (f"max by (role, state) (pd_operator_pddeployment_replicas{{{_ONE}}})", "{{role}} {{state}}")),
            _series(
                "Needed and asked for",
                (f"max by (role) (pd_operator_scaling_need_replicas{{{_ONE}}})", "{{role}} needed"),
                (f"max by (role) (pd_operator_scaling_desired_replicas{{{_ONE}}})", "{{role}} asked for"),
            ),
            _series("Reason", (f"max by (role, reason) (pd_operator_scaling_reason{{{_ONE}}})", "{{role}} {{reason}}")),
            _series("Bottleneck", (f"max by (bottleneck) (pd_operator_scaling_bottleneck{{{_ONE}}})", "{{bottleneck}}")),
            _series(
                "Time to a ready replica",
                (f"max by (role, quantile) (pd_operator_scaling_lead_seconds{{{_ONE}}})", "{{role}} {{quantile}}"),
                unit="s",
                text="Measured from creation to Ready.",
            ),
            _series(
                "Age of the decision",
                (f"time() - max(pd_operator_scaling_decided_timestamp_seconds{{{_ONE}}})", "age"),
                unit="s",
            ),
        ),
    ),
    Row(
        "Prefill",
        (
            _series(
                "Prompt tokens",
                (f"sum(pdserve:computed:rate{{{_PODS}}})", "computed"),
                (f'max(pd_operator_scaling_input{{{_ONE},role="prefill",input="A"}})', "offered"),
                text="Uncached tokens per second.",
            ),
            _series(
                "Waiting requests",
                (f"sum(pdserve:queue:sum{{{_PODS}}})", "router"),
                (f'sum(pdserve:waiting:sum{{{_PODS},{labels.ROLE}="prefill"}})', "prefill"),
            ),
            _series(
                "Time to first token, p95",
                (f"max by ({labels.ROLE}) (pdserve:first_token_quantile:p95{{{_PODS}}})", f"{{{{{labels.ROLE}}}}}"),
                unit="s",
                text="Of each role alone; a client waits for both.",
            ),
        ),
    ),
    Row(
        "Handoff",
        (
            _series(
                "On decode",
                (f'sum(pdserve:running:sum{{{_PODS},{labels.ROLE}="decode"}})', "running"),
                (f"sum(pdserve:fetching:sum{{{_PODS}}})", "handed over and waiting"),
            ),
            _series(
                "Wait and its budget",
                (f'max(pd_operator_scaling_input{{{_ONE},role="decode",input="wait_budget"}})', "budget"),
                (f'max(pd_operator_scaling_input{{{_ONE},role="decode",input="wait"}}) or vector(0)', "wait"),
                unit="s",
            ),
            _series(
                "Prompt tokens on decode, by source",
                (
                    f"sum by (source) (rate({_SOURCES}[$__rate_interval]))",
                    "{{source}}",
                ),
                text="local_compute: decode computed the prompt itself, without a handoff.",
            ),
            _series(
                "Handoffs, as evidence counts them",
                (f"sum(rate(pd_operator_handoff_transfers_total{{{_ONE}}}[$__rate_interval]))", "transfers"),
                (f"sum(rate(pd_operator_handoff_fallback_total{{{_ONE}}}[$__rate_interval]))", "computed on decode"),
                unit="ops",
            ),
            _series("Findings", (f"max by (reason) (pd_operator_handoff_findings{{{_ONE}}})", "{{reason}}")),
            _series(
                "Transfers that failed, KV that expired",
                (f"sum(rate(vllm:nixl_num_failed_transfers_total{{{_PODS}}}[$__rate_interval]))", "failed"),
                (f"sum(rate(vllm:nixl_num_kv_expired_reqs_total{{{_PODS}}}[$__rate_interval]))", "expired"),
                unit="ops",
            ),
        ),
    ),
    Row(
        "Decode",
        (
            _series(
                "KV cache in use",
                (f"max by (pod, {labels.ROLE}) (vllm:kv_cache_usage_perc{{{_PODS}}})", "{{pod}}"),
                unit="percentunit",
            ),
            _series(
                "Time between tokens, mean",
                (f"sum(pdserve:gap_seconds:rate{{{_PODS}}}) / sum(pdserve:gaps:rate{{{_PODS}}})", "mean"),
                unit="s",
            ),
            _series("Output tokens", (f"sum(pdserve:output_tokens:rate{{{_PODS}}})", "per second")),
        ),
    ),
    Row(
        "LMCache",
        (
            _series(
                "Tokens looked up",
                (f"sum(rate(lmcache_mp_lookup_requested_tokens_total{{{_PODS}}}[$__rate_interval]))", "asked"),
                (f"sum(rate(lmcache_mp_lookup_hit_tokens_total{{{_PODS}}}[$__rate_interval]))", "found"),
                columns=12,
            ),
            _series(
                "L1 in use", (f"max by (pod) (lmcache_mp_l1_usage_ratio{{{_PODS}}})", "{{pod}}"), unit="percentunit", columns=12
            ),
        ),
    ),
)
