"""Reading pages: what the regular expression finds is what prometheus_client's own parser finds, and nothing else."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from monitor.pods import Pod
from pd_operator.signals.exposition import Reader, parse_labels, reader
from pd_operator.upstream import signals_catalog as catalog
from pd_operator.upstream.signals_table import Kind, Series, Table


def made(**series: Series) -> Reader:
    """A reader of a table of its own."""
    return Reader(Table("test", series, (), (), ""))


def sums(found: dict) -> dict[str, float]:  # type: ignore[type-arg]
    """Values by series."""
    total: Counter[str] = Counter()
    for slot, value in found.items():
        total[slot.series] += value
    return dict(total)


def test_only_lines_of_the_table() -> None:
    page = b"""# HELP vllm:num_requests_running Number.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running_other{engine="0"} 100.0
xvllm:num_requests_running{engine="0"} 100.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 7.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 100.0
vllm:prompt_tokens_by_source_created{engine="0",source="local_compute"} 1.7e+09
"""
    found = reader("vllm", "0.32.0")
    assert found is not None
    assert sums(found.read(page)) == {"running": 3.0, "computed": 7.0}


def test_first_line_last_line_without_end_and_no_labels() -> None:
    one = made(a=Series(Kind.GAUGE, ("a",)), b=Series(Kind.COUNTER, ("b_total",)))
    assert sums(one.read(b"a 1\nb_total 2")) == {"a": 1.0, "b": 2.0}
    assert one.read(b"") == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("+Inf", math.inf),
        ("-Inf", -math.inf),
        ("Nan", math.nan),
        ("NaN", math.nan),
        ("1e3", 1000.0),
        ("5 1700000000000", 5.0),
        ("x", math.nan),
    ],
)
def test_values_and_time_stamps(text: str, value: float) -> None:
    for labels in ("", '{l="a b"}'):
        (found,) = made(a=Series(Kind.GAUGE, ("a",))).read(f"a{labels} {text}\n".encode()).values()
        assert found == value or (math.isnan(found) and math.isnan(value))


def test_escapes_braces_and_commas_in_labels() -> None:
    assert parse_labels(r'a="x\"y",b="\\n",c="l1\nl2",d="},{",e=""') == {"a": 'x"y', "b": "\\n", "c": "l1\nl2", "d": "},{", "e": ""}
    assert parse_labels('a="1",') == {"a": "1"}
    assert parse_labels('a="1" b="2"') is None
    assert parse_labels("a=1") is None
    one = made(a=Series(Kind.GAUGE, ("a",), {"k": ('v"}',)}))
    assert sums(one.read(b'a{k="v\\"}",z="}"} 4\na{k="v"} 9\n')) == {"a": 4.0}


def test_ranks_add_up_and_copies_do_not() -> None:
    page = "".join(
        f'vllm:num_requests_running{{engine="{engine}",tp_rank="{tp}",pp_rank="{pp}",model_name="m"}} {10 + engine}\n'
        for engine in (0, 1) for tp in (0, 1) for pp in (0, 1)
    )  # fmt: skip
    found = reader("vllm", "0.32.0")
    assert found is not None
    assert sums(found.read(page.encode())) == {"running": 21.0}


def test_a_copy_that_is_no_number_is_not_hidden() -> None:
    one = made(a=Series(Kind.GAUGE, ("a",)))
    for values in (("1", "NaN"), ("NaN", "1")):
        page = "".join(f'a{{tp_rank="{n}"}} {v}\n' for n, v in enumerate(values))
        (value,) = one.read(page.encode()).values()
        assert math.isnan(value)


def test_the_newest_spelling_counts_and_parts_are_added() -> None:
    renamed = made(a=Series(Kind.GAUGE, ("new", "old")))
    assert sums(renamed.read(b"old 3\n")) == {"a": 3.0}
    assert sums(renamed.read(b"old 3\nnew 4\n")) == sums(renamed.read(b"new 4\nold 3\n")) == {"a": 4.0}
    parts = made(a=Series(Kind.GAUGE, ("one", "two"), added=True))
    assert sums(parts.read(b"one 3\ntwo 4\n")) == {"a": 7.0}


def test_the_numbers_of_an_info() -> None:
    one = made(a=Series(Kind.INFO, ("i",), numbers=(("tokens",), ("blocks", "size"))))
    numbers = [
        slot.number
        for page in (
            b'i{tokens="None",blocks="10",size="16"} 1\n',
            b'i{tokens="90",blocks="10",size="16"} 1\n',
            b'i{blocks="x"} 1\n',
        )
        for slot in one.read(page)
    ]
    assert numbers == [160.0, 90.0, None]


def test_heads_are_parsed_once_and_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    one = made(a=Series(Kind.GAUGE, ("a",)))
    first, second = one.read(b'a{l="1"} 1\n'), one.read(b'a{l="1"} 2\n')
    assert [*first] == [*second]  # the same slot, compared by identity
    monkeypatch.setattr("pd_operator.signals.exposition.REMEMBERED", 10)
    for n in range(100):
        one.read(f'a{{l="{n}"}} 1\n'.encode())
    assert len(one._heads) <= 10
    assert len(one._slots) <= 11  # `first` still holds one


names = st.sampled_from(["a", "a_b", "a_total", "b:c", "zz"])
text = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=8)


@given(st.lists(st.tuples(names, st.dictionaries(st.sampled_from(["x", "le", "y_1"]), text, max_size=3), st.floats()), max_size=12))
def test_agrees_with_the_reference_parser(lines: list[tuple[str, dict[str, str], float]]) -> None:
    seen = {(name, tuple(sorted(own.items()))): (name, own, value) for name, own, value in lines}.values()
    pod = "".join(_line(*one) for one in seen)
    table = made(**{name: Series(Kind.GAUGE, (name,)) for name in ("a", "b:c", "a_total")})
    reference: Counter[str] = Counter()
    for family in text_string_to_metric_families(pod):
        for sample in family.samples:
            reference[sample.name] += 1
    ours = Counter(slot.series for slot in table.read(pod.encode()))
    assert ours == Counter({k: v for k, v in reference.items() if k in ("a", "b:c", "a_total")})
    values = sorted(repr(v) for v in table.read(pod.encode()).values())
    assert values == sorted(repr(v) for name, _, v in seen if name in ("a", "b:c", "a_total"))


def _line(name: str, own: dict[str, str], value: float) -> str:
    escaped = {k: v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for k, v in own.items()}
    inner = ",".join(f'{k}="{v}"' for k, v in escaped.items())
    return f"{name}{{{inner}}} {value!r}\n" if inner else f"{name} {value!r}\n"


@pytest.mark.parametrize("program", sorted(catalog.PROGRAMS))
def test_every_series_of_a_table_can_be_read(program: str) -> None:
    table = catalog.table(program, "")
    assert table is not None
    page = ""
    for series in table.series.values():
        for name in series.names:
            own = ",".join(f'{k}="{v[0]}"' for k, v in series.match.items())
            page += f"{name}{{{own}}} 1\n"
    found = reader(program, "")
    assert found is not None
    assert {slot.series for slot in found.read(page.encode())} == set(table.series)


def test_pods_of_the_tests_show_all_that_vllm_s_table_asks() -> None:
    found = reader("vllm", "0.32.0")
    assert found is not None
    page = Pod("decode", fetching={"in_progress": 1}).page()
    table = catalog.table("vllm", "0.32.0")
    assert table is not None
    asked = {name for q in table.quantities for name in (q.series, q.info) if name}
    assert {slot.series for slot in found.read(page)} == asked - {"rejected"}


def test_a_page_of_the_real_smg() -> None:
    """Lines of smg 1.13.0 when 7 requests had come: 2 ran, 2 were queued, 2 rejected (--max-concurrent-requests 2)."""
    page = b"""# TYPE smg_http_requests_total counter
smg_http_requests_total{method="POST",path="/v1/completions"} 6
smg_http_requests_total{method="GET",path="/readiness"} 1
smg_http_requests_total{method="POST",path="/v1/chat/completions"} 1
smg_http_responses_total{path="/v1/completions",status_code="429",error_code="admission_queue_full"} 1
smg_admission_queue_rejected_total{reason="full"} 2
smg_admission_inflight 2
smg_admission_queue_depth 2
smg_pd_admission_window{worker="http://127.0.0.1:58223"} 0
"""
    found = reader("smg", "1.13.0")
    assert found is not None
    assert sums(found.read(page)) == {"offered": 7.0, "queue": 2.0, "refused": 2.0}
