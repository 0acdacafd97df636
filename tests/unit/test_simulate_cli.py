"""The command pdd-simulate: answers, exit codes, errors that say what would be accepted, and every command of its page."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import simulate_study as made

from generated import ROOT
from opsrunner.waits import until
from pd_simulate import cli, scenario, units

PAGE = ROOT / "docs" / "simulate" / "index.md"
SMALL = ["--trace", "steady", "--gpus", "16", "--requests", "600"]


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    try:
        code = cli.main(arguments)
    except SystemExit as exc:  # argparse
        code = int(exc.code or 0)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def write_trace(path: Path, count: int = 400, gap: float = 0.25) -> Path:
    rows = [f"{gap * index:.2f},{2000 + 37 * (index % 50)},{100 + index % 40}" for index in range(count)]
    path.write_text("arrival,prompt,output\n" + "\n".join(rows) + "\n")
    return path


# run


def test_run_tells_a_person_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "run", *SMALL, "--policy", "hpa-utilization", "--set", "target=0.6")
    assert code == 0 and err == "", "no progress where there is no terminal"
    for word in (
        "attainment",
        "goodput",
        "GPU-seconds",
        "outcomes    completed",
        "time to first token",
        "bottleneck",
        "reversals/h",
    ):
        assert word in out
    assert re.search(r"prefill ready, \d+ to \d+", out) and "█" in out


def test_run_gives_the_same_numbers_as_json_and_again(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("run", *SMALL, "--policy", "hpa-utilization", "-o", "json")
    code, out, _ = call(capsys, *arguments)
    first: dict[str, Any] = json.loads(out)
    again: dict[str, Any] = json.loads(call(capsys, *arguments[:-2], "--json")[1])
    assert code == 0 and first["offered"] > 300
    outcomes = ("completed", "rejected", "cancelled", "timed_out", "expired", "failed", "unfinished")
    assert sum(first[name] for name in outcomes) == first["offered"]
    assert sum(first["bottleneck"].values()) == pytest.approx(1)
    assert len(first["timeline"]["columns"]["time"]) > 3
    assert {**first, "wall_seconds": 0} == {**again, "wall_seconds": 0}
    other: dict[str, Any] = json.loads(call(capsys, *arguments, "--seed", "5")[1])
    assert other["ttft_p50"] != first["ttft_p50"]


def test_a_user_brings_a_trace_and_an_slo(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "mine.csv")
    base = ("run", "--trace", str(trace), "--policy", "hpa-utilization", "--gpus", "4", "-o", "json")
    easy = json.loads(call(capsys, *base)[1])
    strict = json.loads(call(capsys, *base, "--slo", "ttft=1ms,itl=50ms")[1])
    assert easy["attainment"] > 0.9 and strict["attainment"] == 0.0
    assert json.loads(call(capsys, *base, "--slo-ttft", "1ms")[1])["attainment"] == 0.0, "flat"
    assert json.loads(call(capsys, *base, "--slo", "chat", "--slo-ttft", "1ms")[1])["attainment"] > 0.9, "and 100 ms per thousand"
    assert json.loads(call(capsys, *base, "--slo-itl", "1ms")[1])["attainment"] == 0.0


def test_a_user_brings_step_times(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A table of an engine that takes 1 ms a prompt token: a prompt of 2,000 tokens waits 2 s for its first token."""
    rows = ["config,phase,context_tokens,batch_size,latency_ms,kv_capacity,kv_bytes_per_token"]
    rows += [f"slow,prefill,{tokens},1,{tokens},400000,131072" for tokens in (500, 1000, 2000, 3000, 4000, 6000, 8000)]
    rows += [f"slow,decode,{tokens},{batch},{5 + batch / 10},400000,131072" for tokens in (1000, 4000) for batch in (1, 8, 32, 64)]
    table = tmp_path / "steps.csv"
    table.write_text("\n".join(rows) + "\n")
    trace = tmp_path / "one.csv"
    trace.write_text("arrival,prompt,output\n" + "".join(f"{30 * index},2000,20\n" for index in range(10)))
    base = ("run", "--trace", str(trace), "--policy", "hpa-utilization", "--gpus", "4", "--slo", "ttft=5s,itl=50ms", "--json")
    found = json.loads(call(capsys, *base, "--profile", str(table))[1])
    assert found["ttft_p50"] == pytest.approx(2.0, abs=0.1) and found["attainment"] == 1.0
    table.write_text(rows[0] + "\n" + "\n".join(rows[1:4]).replace("1000,1,1000", "1000,1,long") + "\n")
    code, _, err = call(capsys, *base, "--profile", str(table))
    assert code == 2 and "steps.csv" in err and "long" in err


def test_an_aggregated_fleet_prefills_and_decodes_in_the_same_engines(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(call(capsys, "run", *SMALL, "--policy", "aggregated-static", "--set", "share=0.75", "--json")[1])
    assert set(found["timeline"]["columns"]["prefill_ready"]) == {0.0}
    assert set(found["timeline"]["columns"]["decode_ready"]) == {12.0} and found["mean_gpus"] == pytest.approx(12.0)
    assert found["completed"] == found["offered"] > 300


def test_decisions_are_recorded_and_replay(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "decisions.jsonl"
    assert call(capsys, "run", *SMALL, "--policy", "ours", "--decisions", str(file))[0] == 0
    lines = file.read_text().splitlines()
    assert len(lines) >= 5
    code, out, _ = call(capsys, "replay", str(file))
    assert code == 0 and out == f"{len(lines)} decisions agree\n"
    # One answer changed by hand: named with both answers and its inputs.
    record = json.loads(lines[2])
    record["decision"]["prefill"]["desired"] += 1
    file.write_text("\n".join([*lines[:2], json.dumps(record), *lines[3:]]) + "\n")
    code, out, _ = call(capsys, "replay", str(file))
    assert code == 1 and "line 3: the decision of simulated at" in out
    assert re.search(r"decision\.prefill\.desired: recorded \d+, now \d+", out)
    assert "readings:" in out and "prompt_rate" in out and "bounds:" in out and "2 decisions before it agree" in out


def test_progress_renews_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("pd_simulate.progress.TERMINAL_EVERY", 0.0)
    _, _, err = call(capsys, "run", *SMALL, "--policy", "hpa-utilization")
    assert re.search(r"\rsimulated seconds +\d+%  \d+/\d+  \S+ gone, \S+ left", err)


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--trace", "nowhere.csv"], "trace 'nowhere.csv': no such file; built-in names are steady, burst"),
        (["run", *SMALL, "--policy", "magic"], "policy 'magic': accepted are "),
        (["run", *SMALL, "--profile", "TPU"], "profile 'TPU': no such file; names that ship are "),
        (["run", *SMALL, "--slo", "fast"], "slo 'fast': accepted are chat, long, strict, or ttft=2s,itl=50ms"),
        (["run", *SMALL, "--slo", "ttft=2,itl=50ms"], "slo ttft '2': accepted is a duration such as 50ms, 2s"),
        (["run", *SMALL, "--slo-itl", "fast"], "--slo-itl 'fast': accepted is a duration"),
        (["run", *SMALL, "--lead-time", "-1s"], "argument --lead-time"),
        (["run", *SMALL, "--shock", "boom"], "--shock 'boom': accepted are none, outputs-x3"),
        (["run", *SMALL, "--set", "target"], "--set 'target': accepted is key=value"),
        (["run", *SMALL, "--policy", "hpa-utilization", "--set", "x=1"], "--set x: accepted with hpa-utilization are target"),
        (["run", *SMALL, "--policy", "hpa-utilization", "--set", "target=high"], "--set target=high: accepted is a number"),
        (["run", "--trace", "steady", "--gpus", "1"], "--gpus 1: accepted is 2 to 1024"),
        (["run", "--trace", "steady", "--gpus", "4", "--profile", "DSV3-H200-TP8"], "budget 4: one P and one D of"),
        (["run", "--trace", "steady", "--requests", "70000"], "--requests 70000: accepted is 1 to 60000"),
        (["run", *SMALL, "--load", "9"], "--load 9: accepted is 0 (the trace's own rate) to 3"),
        (["run", *SMALL, "--policy", "oracle", "--decisions", "x.jsonl"], "oracle records none; accepted with --policy ours"),
        (["run", "--trace", "azure_conv"], "PDD_TRACES: not set"),
        (["compare", "--matrix", "nowhere.yaml"], "--matrix nowhere.yaml: No such file or directory; accepted is a YAML file"),
        (["compare", "--profile", "smoke", "--jobs", "0"], "--jobs 0: accepted is a number from 1"),
        (["compare", "--profile", "smoke", "--limit", "8"], "--limit '8': accepted is a duration"),
        (["compare"], "one of the arguments --profile --matrix is required"),
        (["report", "nowhere"], "nowhere: no readable plan.json"),
        (["replay", "nowhere.jsonl"], "nowhere.jsonl: [Errno 2]"),
        (["recommend", "--trace", "steady", "--attainment", "100"], "--attainment 100: accepted is a percentage between 0 and 100"),
        (["dance"], "invalid choice: 'dance'"),
    ],
)  # fmt: skip
def test_wrong_input_is_explained(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PDD_TRACES", raising=False)
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "") and message in err and "Traceback" not in err


def test_a_damaged_trace_and_decision_are_named_by_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "mine.csv"
    trace.write_text("arrival,prompt,output\n0.0,100,10\n1.0,many,10\n")
    code, _, err = call(capsys, "run", "--trace", str(trace), "--gpus", "4")
    assert code == 2 and "mine.csv" in err and "3" in err and "many" in err
    file = tmp_path / "decisions.jsonl"
    file.write_text('{"format": 99}\n')
    code, _, err = call(capsys, "replay", str(file))
    assert code == 2 and "line 1: format is 99: accepted is 1" in err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("run", "compare", "report", "replay", "recommend"):
        code, out, _ = call(capsys, command, "--help")
        assert code == 0 and f"  pdd-simulate {command} " in out.split("example")[-1]
    code, out, _ = call(capsys, "list")
    assert code == 0 and all(f"  {name} " in out for name in ("ours", "oracle", "dynamo-sla", "wva-v2")) and "prompts-x4" in out


def test_help_does_not_need_numpy() -> None:
    code = "import sys; sys.modules['numpy'] = None; from pd_simulate import cli; cli.main(['run', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 0 and "--trace" in done.stdout


def test_units() -> None:
    assert [units.seconds(text, "x") for text in ("50ms", "2s", "1m30s", "8h", "0.5s")] == [0.05, 2.0, 90.0, 28800.0, 0.5]
    for text in ("", "5", "2 s", "1d", "-1s"):
        with pytest.raises(units.InputError, match="x "):
            units.seconds(text, "x")
    assert units.setting("a=0.5") == ("a", 0.5) and units.setting("kind=arima") == ("kind", "arima")
    assert scenario.slo("ttft=2s,itl=50ms,per-thousand=100ms") == scenario.Slo(2.0, 1e-4, 0.05)


# recommend


def test_recommend_says_how_many_which_split_and_what_lacked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "mine.csv", count=600, gap=0.1)
    arguments = ("recommend", "--trace", str(trace), "--slo-ttft", "2s", "--slo-itl", "50ms", "--lead-time", "10s")
    code, out, _ = call(capsys, *arguments, "--json")
    answer: dict[str, Any] = json.loads(out)
    assert code == 0 and answer["fixed"]["attainment"] >= 0.95
    assert answer["fixed"]["gpus"] == answer["fixed"]["prefill"] + answer["fixed"]["decode"] <= answer["budget"]
    assert len(answer["scaled"]) == 5 and answer["best"]["attainment"] >= 0.95
    assert min(item["mean_gpus"] for item in answer["scaled"] if item["attainment"] >= 0.95) == answer["best"]["mean_gpus"]
    lacking = " ".join(answer["lacking"])
    for word in ("prefix hits", "cancellations", "length", "start-up", "network", "chance"):
        assert word in lacking
    code, out, _ = call(capsys, *arguments)
    fixed = answer["fixed"]
    assert code == 0 and f"{fixed['prefill']} P + {fixed['decode']} D = {fixed['gpus']} GPUs attain" in out
    # Nothing attains what the engine cannot do.
    hopeless = json.loads(call(capsys, *arguments, "--slo-ttft", "1ms", "--json", "--gpus", "4")[1])
    assert hopeless["best"] is None and hopeless["fixed"]["attainment"] < 0.95


# compare


def test_compare_that_is_ended_leaves_no_worker_and_says_how_to_go_on(tmp_path: Path) -> None:
    results = tmp_path / "results"
    command = [sys.executable, "-m", "pd_simulate.cli", "compare", "--profile", "smoke", "-o", str(results), "--jobs", "1"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    cells = results / "cells.jsonl"
    until("its first cell", lambda: cells.exists() and cells.stat().st_size, timeout=120)
    workers = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
    run.send_signal(signal.SIGTERM)  # not SIGINT, which what a shell runs in the background ignores
    out, err = run.communicate(timeout=60)
    assert run.returncode == 1 and "goes on from its results folder" in err and "Traceback" not in out + err
    until("its processes to end", lambda: not [pid for pid in workers if Path(f"/proc/{pid}").exists()])  # their tracker is last
    assert workers
    assert all(json.loads(line) for line in cells.read_text().splitlines())


# report


def test_report_writes_what_was_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = made.write(tmp_path / "results", made.rows("azure_conv"))
    page, tables, text = tmp_path / "out" / "r.html", tmp_path / "tables", tmp_path / "s.md"
    code, out, _ = call(capsys, "report", str(folder), "-o", str(page), "--csv", str(tables), "--summary", str(text))
    assert code == 0 and "ours needs less than the best peer in 1" in out
    assert page.read_text().startswith("<!doctype html>") and text.read_text().startswith("# Simulated comparison")
    assert sorted(path.name for path in tables.iterdir()) == ["matched.csv", "points.csv"]


# The page of the documentation


def environment(**more: str) -> dict[str, str]:
    paths = os.pathsep.join(str(ROOT / name) for name in ("operator", "tests"))
    return {**os.environ, "PYTHONPATH": paths, **more}


@pytest.mark.timeout(600)
def test_every_command_of_the_page(tmp_path: Path) -> None:
    """In order, in one folder, as a reader would type them."""
    program = tmp_path / "bin" / "pdd-simulate"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pd_simulate.cli "$@"\n')
    program.chmod(0o755)
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S)
    assert {word for block in blocks for word in re.findall(r"^pdd-simulate (\w+)", block, flags=re.M)} == {
        "run", "recommend", "replay", "compare", "report"
    }  # fmt: skip
    outputs = []
    for block in blocks:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            env=environment(PATH=f"{program.parent}{os.pathsep}{os.environ['PATH']}"),
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        outputs.append(done.stdout)
    assert "attainment" in outputs[0] and "fixed split" in outputs[1] and "decisions agree" in outputs[2]
    assert "12 of 12 cells have a result, 0 failed, 0 not run" in outputs[3]
    assert (tmp_path / "report.html").stat().st_size > 20_000 and (tmp_path / "results" / "matched.csv").is_file()


def test_the_page_names_what_exists() -> None:
    text = PAGE.read_text()
    flags = set(re.findall(r"`(--[a-z-]+)", text))
    known = set(re.findall(r'"(--[a-z-]+)"', Path(cli.__file__).read_text()))
    assert flags <= known, flags - known
