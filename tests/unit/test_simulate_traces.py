"""Loaders: each format, and that an error names file, line, field, value and what would be accepted."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from pd_simulate import servegen, traces
from pd_simulate.traces import TraceError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.2319600,110,0
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]},
    {"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [0, 2]},
]


def _traces() -> Path | None:
    """The public traces: PDD_TRACES, or shared/traces beside the checkout."""
    beside = Path(__file__).parents[3] / "shared" / "traces"
    given = os.environ.get("PDD_TRACES")
    return Path(given) if given else beside if beside.is_dir() else None


def _file(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["azure_llm_2023_code.csv", "azure_llm_2023_code.csv.gz"])
def test_azure(tmp_path: Path, name: str) -> None:
    _file(tmp_path, name, AZURE)
    load = traces.load("azure_code", tmp_path)
    assert load.name == "azure_code"
    assert load.arrival.tolist() == pytest.approx([0.0, 0.252])
    assert load.prompt.tolist() == [4808, 110]
    assert load.output.tolist() == [10, 1]  # a request streams one token at least


def test_mooncake(tmp_path: Path) -> None:
    _file(tmp_path, "mooncake_fast25_conversation.jsonl.gz", "\n".join(json.dumps(row) for row in MOONCAKE))
    load = traces.load("mooncake_conversation", tmp_path)
    assert load.arrival.tolist() == [0.0, 3.0]
    assert load.prefix == ((0, 1), (0, 2))
    assert load.block == 512


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    text = "prompt,Output,arrival,cached,cancel_after\n10,5,7.5,3,\n20,6,2.5,0,1.5\n"
    load = traces.load(str(_file(tmp_path, "mine.csv", text)))
    assert load.arrival.tolist() == [0.0, 5.0]
    assert load.prompt.tolist() == [20, 10]
    assert load.cached.tolist() == [0, 3]
    assert load.cancel_after.tolist() == [1.5, float("inf")]
    rows = '{"arrival": 1, "prompt_tokens": 8, "output_tokens": 2}\n\n{"arrival": 2, "prompt_tokens": 9, "output_tokens": 2}\n'
    assert traces.load(str(_file(tmp_path, "mine.jsonl", rows))).prompt.tolist() == [8, 9]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "arrival,prompt\n1,2\n", "a.csv, line 1: no field 'output'; accepted: output, output_tokens"),
        (
            "a.csv",
            "arrival,prompt,output\n1,2,3\n2,x,3\n",
            "a.csv, line 3, prompt: 'x'; accepted: a whole number of tokens, 1 or more",
        ),
        ("a.csv", "arrival,prompt,output\n1,0,3\n", "a.csv, line 2, prompt: '0'; accepted: a whole number of tokens, 1 or more"),
        ("a.csv", "arrival,prompt,output\n1,2.5,3\n", "a.csv, line 2, prompt: '2.5'; accepted"),
        (
            "a.csv",
            "arrival,prompt,output\nnoon,2,3\n",
            "a.csv, line 2, arrival: 'noon'; accepted: seconds from 0 on, or an ISO 8601",
        ),
        ("a.csv", "arrival,prompt,output\n-1,2,3\n", "a.csv, line 2, arrival: '-1'; accepted"),
        ("a.csv", "arrival,prompt,output\nnan,2,3\n", "a.csv, line 2, arrival: 'nan'; accepted"),
        ("a.csv", "arrival,prompt,output\n1,2\n", "a.csv, line 2, output: None; accepted: a whole number of tokens, 0 or more"),
        ("a.csv", "arrival,prompt,output\n", "a.csv: no requests; accepted: one or more"),
        ("a.jsonl", "{\n", "a.jsonl, line 1: '{' is not JSON; accepted: one JSON object a line"),
        ("a.jsonl", "[1]\n", "a.jsonl, line 1: '[1]'; accepted: one JSON object a line"),
        ("a.jsonl", '{"arrival": 0, "prompt": 1, "output": true}', "a.jsonl, line 1, output: True; accepted"),
        ("a.parquet", "", "a.parquet: unknown kind 'parquet'; accepted: .csv, .jsonl"),
    ],
)
def test_errors_say_where_and_what(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(TraceError) as caught:
        traces.load(str(_file(tmp_path, name, text)))
    assert message in str(caught.value)


def test_a_gz_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_text("arrival,prompt,output\n1,2,3\n")
    with pytest.raises(TraceError, match=r"a.csv.gz: .*accepted: text in UTF-8, gzip only with .gz"):
        traces.load(str(tmp_path / "a.csv.gz"))


def test_names_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDD_TRACES", raising=False)
    with pytest.raises(TraceError, match="PDD_TRACES: not set"):
        traces.load("azure_code")
    monkeypatch.setenv("PDD_TRACES", str(tmp_path / "none"))
    with pytest.raises(TraceError, match="is no folder"):
        traces.load("azure_code")
    monkeypatch.setenv("PDD_TRACES", str(tmp_path))
    with pytest.raises(TraceError, match=r"azure_llm_2023_code.csv: not in .*; accepted: that file, or the same with .gz"):
        traces.load("azure_code")
    with pytest.raises(TraceError, match=r"trace: 'nowhere.csv' is no file; accepted: a path, or one of azure_code"):
        traces.load("nowhere.csv")


def _archive(path: Path, files: dict[str, str]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))


def test_servegen_draws_the_rates_and_lengths_it_is_given(tmp_path: Path) -> None:
    rates = "".join(f"{600 * i},{3.0 if i < 3 else 1.0},1.5,Gamma,1,1\n" for i in range(6))
    _archive(tmp_path / "servegen_tiny_clients_rate.tar.gz", {"chunk-0-trace.csv": rates, "chunk-1-trace.csv": "0,5.0,1,,0,0\n"})
    tables = {"0": {"input_tokens": "{100: 0.75, 300: 0.25}", "output_tokens": "{50: 1.0}"}}
    _archive(tmp_path / "servegen_tiny_clients_lengths.tar.gz", {"chunk-0-dataset.json": json.dumps(tables)})
    load = servegen.generate(tmp_path, "tiny", rate=4.0, seed=1, duration=3600.0)
    assert len(load) == pytest.approx(4.0 * 3600, rel=0.05)
    first = (load.arrival < 1800).sum()
    assert first / (len(load) - first) == pytest.approx(3.0, rel=0.1)
    assert load.prompt.mean() == pytest.approx(150, rel=0.02)
    assert set(load.output.tolist()) == {50}
    with pytest.raises(TraceError, match=r"servegen tiny: no arrivals in \[7200, 10800\) s"):
        servegen.generate(tmp_path, "tiny", rate=1.0, seed=1, start=7200.0, duration=3600.0)


@pytest.mark.parametrize(
    ("name", "count", "prompt", "output"), [("azure_code", 8819, 2048, 28), ("mooncake_conversation", 12031, 12035, 343)]
)
def test_the_public_traces_are_what_their_readme_says(name: str, count: int, prompt: int, output: int) -> None:
    where = _traces()
    if where is None:
        return  # a clone without the traces: the formats are covered above
    load = traces.load(name, where)
    assert len(load) == count
    assert (round(load.prompt.mean()), round(load.output.mean())) == (prompt, output)
