"""The canary: a few requests through a slice's own Service, and the counters of its engines before and after.

It runs in a Job beside the slice, reaches nothing but what its case names, and leaves its evidence in the termination message.
It proves nothing by what a program says of itself; `core/proof.py` judges what moved.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

import requests

from pd_operator.canary_http import Http, NoAnswer
from pd_operator.core.canary_case import BUDGET, KEY_VARIABLE, REQUESTS, VARIABLE, Case, Engine
from pd_operator.core.proof import MAX_BYTES, Cache, Comparison, Evidence, Moved, Reuse, Verdict, judge_handoff, judge_offload
from pd_operator.signals.exposition import Reader
from pd_operator.upstream import canary_counters

T = TypeVar("T")
R = TypeVar("R")
TERMINATION_LOG: Final = "/dev/termination-log"
ANSWER_TOKENS: Final = 16  # wrong state shows at the first token; the more there are, the more often rounding shows too
PLAIN_CHUNK: Final = 256  # tokens, where there is no LMCache whose chunks a prompt should span
CONNECT: Final = 30.0  # seconds until the Service accepts a connection: kube-proxy learns of an endpoint a moment after it is ready
PEERS: Final = 30.0  # seconds until LMCache servers see each other: two heartbeats and a poll once the coordinator answers
LATE: Final = 10.0  # seconds that counters may come after the answer
PAGE: Final = 10.0  # seconds for a page, tries included
PERIOD: Final = 0.5  # seconds between two looks at counters
AT_ONCE: Final = 16  # pages
TRIES: Final = 64  # to find a text of a wanted length
SHOWN: Final = 240  # characters of somebody else's words
WITHOUT: Final = "or spec.verification: Advisory or Disabled"
WORDS: Final = (
    *("river", "boats", "stone", "houses", "children", "birds", "quiet", "fields", "teacher", "seven", "letters", "weather"),
    *("music", "bread", "winter", "light", "green", "glass", "paper", "doors", "open", "slowly", "after", "rain", "count", "while"),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole answer."""

    prompt: str
    text: str
    tokens: int  # of the prompt


class Failed(Exception):
    """A request without a whole answer; the text says what came instead."""


class Canary:
    """One run of one case."""

    def __init__(self, case: Case, key: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._case = case
        self._clock = clock
        self._began = clock()
        self._http = Http(key, clock)
        self._fields = {
            case.engine: ("spec.engine.version", case.engine_version),
            case.router: ("spec.router.version", case.router_version),
            "lmcache": ("spec.lmcache.version", case.cache_version),
        }
        self._readers = {name: [Reader(t) for t in canary_counters.tables(name, v)] for name, (_, v) in self._fields.items()}
        self._dice = random.Random(f"{case.mark} {time.time_ns()}")  # no cache may know its prompts

    def run(self) -> Evidence:
        """All of it; a step that cannot be done ends it, with what was waited for."""
        seen = Evidence(cached=bool(self._case.chunk))
        try:
            seen = self._measured(seen)
        except NoAnswer as problem:
            seen = seen.model_copy(update={"problem": str(problem)[: 2 * SHOWN]})
        return seen.model_copy(update={"seconds": round(self._clock() - self._began, 1)})

    def _measured(self, seen: Evidence) -> Evidence:
        case = self._case
        versions = sorted(set(self._each(self._version, (*case.prefill, *case.decode))))
        apart = self._apart()
        before, caches = self._counters(), self._caches()
        prompts = [self._prompt() for _ in range(REQUESTS)]
        answers: list[Answer] = []
        failure = ""
        for number, prompt in enumerate(prompts):
            try:
                answers.append(self._ask(case.url, prompt, f"{case.mark}-{number}", CONNECT))
            except Failed as error:
                failure = str(error)
                break  # the others would say the same
        sent, tokens = len(answers) + bool(failure), sum(a.tokens for a in answers)
        chunks = sum(a.tokens // case.chunk for a in answers) if case.chunk else 0
        goal = Evidence(sent=sent, tokens=tokens, chunks=chunks)
        after, cache = self._settled(before, caches, goal)
        moved = {role: _moved(before[role], after[role]) for role in ("prefill", "decode")}
        return seen.model_copy(
            update={
                "versions": versions if len(versions) > 1 else [],
                "sent": sent,
                "failures": int(bool(failure)),
                "failure": failure,
                "tokens": tokens,
                "chunks": chunks,
                "shared": max(moved["prefill"].answered, moved["decode"].answered) > sent,
                "passed": after["router"].get("passed", 0.0) - before["router"].get("passed", 0.0),
                **moved,
                "cache": cache.model_copy(update={"apart": apart[: 2 * SHOWN]}),
                "output": Comparison() if failure else self._compare(answers),
                "reuse": Reuse(skipped="not tried") if failure else self._reuse(answers[0]),
            }
        )

    # --- counters -----------------------------------------------------------------------------------------------------------

    def _counters(self) -> dict[str, dict[str, float]]:
        """Role (or router) -> counter -> sum over its pods. Raises NoAnswer."""
        case = self._case
        return {
            "prefill": self._sum(case.engine, [f"{e.url}/metrics" for e in case.prefill]),
            "decode": self._sum(case.engine, [f"{e.url}/metrics" for e in case.decode]),
            "router": self._sum(case.router, [f"{url}/metrics" for url in case.routers]),
        }

    def _caches(self) -> dict[str, float] | str:
        """Counters of prefill's LMCache servers, or why they cannot be had."""
        urls = [e.cache for e in self._case.prefill if e.cache]
        if not urls or not self._case.chunk:
            return {}
        try:
            found = self._sum("lmcache", [f"{url}/metrics" for url in urls])
            statuses = self._each(lambda url: json.loads(self._http.page(f"{url}/status", PAGE)), urls)
            found["objects"] = sum(float(s["storage_manager"]["l1_manager"]["total_object_count"]) for s in statuses)
            if self._case.p2p:
                lent = self._sum("lmcache", [f"{e.cache}/metrics" for e in self._case.decode if e.cache])
                found["borrowed"] = found.get("borrowed", 0.0) + lent.get("borrowed", 0.0)
        except (NoAnswer, ValueError, KeyError, TypeError) as error:
            return f"LMCache: {self._http.told(error)}"
        return found

    def _apart(self) -> str:
        """With P2P: which LMCache server does not see the others, after `PEERS` seconds; one that is down is told elsewhere."""
        servers = [e for e in (*self._case.prefill, *self._case.decode) if e.cache] if self._case.p2p else []
        end = self._clock() + PEERS
        while servers:
            try:
                lost = [said for said in self._each(lambda e: self._lonely(e, len(servers) - 1), servers) if said]
            except (NoAnswer, ValueError, KeyError, TypeError):
                return ""
            if not lost:
                return ""
            if self._clock() > end:
                return f"{lost[0]}, {len(lost)} of {len(servers)} servers likewise; waited {PEERS:.0f} s"
            time.sleep(PERIOD)
        return ""

    def _lonely(self, engine: Engine, others: int) -> str:
        status = json.loads(self._http.page(f"{engine.cache}/status", PAGE))
        state, peers = str(status["p2p_state"]), int(status["p2p_peer_count"])
        well = state == "registered" and peers >= others
        return "" if well else f"the LMCache server of pod {engine.pod} is {state} and sees {peers} of {others} others"

    def _sum(self, program: str, urls: Iterable[str]) -> dict[str, float]:
        """Counter -> sum over pages. Raises NoAnswer, also when a page lacks what every page of that program has."""
        readers, total = self._readers[program], dict[str, float]()
        if not readers and program == self._case.engine:
            raise NoAnswer(f"spec.engine.type={program}: no table knows its counters; accepted: vllm, {WITHOUT}")
        if not readers:
            return total
        for page in self._each(lambda url: self._http.page(url, PAGE), urls):
            for slot, value in ((slot, value) for reader in readers for slot, value in reader.read(page).items()):
                total[slot.series] = total.get(slot.series, 0.0) + value
        known = {key: series for reader in readers for key, series in reader.table.series.items()}
        lost = sorted({s.names[0] for key, s in known.items() if not s.optional and key not in total})
        if lost:
            field, version = self._fields[program]
            raise NoAnswer(
                f"{field}={version}: {program} has no series {', '.join(lost)}, so nothing can be proven by its counters; "
                f"accepted: a version that has them ({canary_counters.SEEN}), {WITHOUT}"
            )
        return total

    def _settled(
        self, before: Mapping[str, Mapping[str, float]], caches: Mapping[str, float] | str, goal: Evidence
    ) -> tuple[dict[str, dict[str, float]], Cache]:
        """The counters, as soon as they show what a handoff that worked would show, or after `LATE` seconds."""
        end = self._clock() + LATE
        while True:
            after, now = self._counters(), self._caches()
            decode, cache = _moved(before["decode"], after["decode"]), _cache(caches, now)
            whole = decode.transfers >= goal.sent and decode.received >= goal.tokens
            stored = max(cache.written, cache.objects) >= goal.chunks or bool(cache.down)
            if (whole and stored) or self._clock() > end:
                return after, cache
            time.sleep(PERIOD)

    def _version(self, engine: Engine) -> str:
        try:
            return str(json.loads(self._http.page(f"{engine.url}/version", PAGE))["version"])
        except (ValueError, KeyError, TypeError) as error:
            raise NoAnswer(f"{engine.pod}: {engine.url}/version is no version: {self._http.told(error)}") from error

    def _each(self, do: Callable[[T], R], items: Iterable[T]) -> list[R]:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(do, items))

    # --- requests -----------------------------------------------------------------------------------------------------------

    def _prompt(self) -> str:
        """A new text of more than two chunks and an odd number of tokens: it ends inside a block and inside a chunk."""
        words = self._words(32)
        count, longest = self._tokens(words)
        ceiling = longest - ANSWER_TOKENS - 4 if longest else 2**31
        wanted = min(2 * (self._case.chunk or PLAIN_CHUNK) + 9, ceiling - 8)
        if not count:  # a word is a token at least
            return " ".join(self._words(wanted))
        words = self._words(max(1, 32 * wanted // count))
        for _ in range(TRIES):
            count, _ = self._tokens(words)
            if count % 2 and wanted <= count <= ceiling:
                break
            words = [*words, *self._words(1)] if count <= wanted else self._words(len(words) - (count > ceiling - 2))
        return " ".join(words)

    def _words(self, number: int) -> list[str]:
        return [self._dice.choice(WORDS) for _ in range(number)]

    def _tokens(self, words: list[str]) -> tuple[int, int]:
        """(tokens of a text, longest that the model takes); zeros where the engine does not tell."""
        body = {"model": self._case.model, "prompt": " ".join(words)}
        try:
            status, text = self._http.post(f"{self._case.prefill[0].url}/tokenize", body, PAGE)
            found = json.loads(text) if status == 200 else {}
            return int(found.get("count", 0)), int(found.get("max_model_len", 0))
        except (requests.RequestException, ValueError, AttributeError, TypeError):
            return 0, 0

    def _ask(self, url: str, prompt: str, mark: str, connect: float = 0.0) -> Answer:
        """One answer at temperature 0. Raises Failed, or NoAnswer when nothing accepts the connection for `connect` seconds."""
        body = {
            "model": self._case.model,
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": False,
        }
        left = BUDGET - (self._clock() - self._began)
        if left <= 0:
            raise NoAnswer(f"the canary did not come to an end within {BUDGET:.0f} s; {url} was next")
        try:
            status, text = self._http.post_patiently(f"{url}/v1/completions", body, left, connect, {"X-Request-Id": mark})
        except requests.RequestException as error:
            raise Failed(f"{url}: {self._http.told(error)[:SHOWN]}") from error
        try:
            found = json.loads(text)
            choice = found["choices"][0]
            if status == 200 and choice["finish_reason"] in ("length", "stop"):
                return Answer(prompt, str(choice["text"]), int(found["usage"]["prompt_tokens"]))
        except (ValueError, KeyError, TypeError, IndexError):
            pass
        raise Failed(f"{url} answered {status}: {self._http.told(text)[:SHOWN]}")

    def _compare(self, answers: list[Answer]) -> Comparison:
        """The same prompts through one prefill engine alone. Not decode: it would read the very state that it was handed."""
        alone, same, shown = self._case.prefill[0], 0, ""
        compared = 0
        for number, answer in enumerate(answers):
            try:
                own = self._ask(alone.url, answer.prompt, f"{self._case.mark}-alone-{number}")
            except Failed as error:
                shown = shown or f"{alone.pod} alone: {error}"
                continue
            compared += 1
            same += own.text == answer.text
            if own.text != answer.text and not shown:
                shown = f"{answer.text[:40]!r} instead of {own.text[:40]!r}"
        return Comparison(compared=compared, same=same, shown=shown[:SHOWN])

    def _reuse(self, answer: Answer) -> Reuse:
        """A prompt again, after prefill's own cache was dropped, where the engine offers that and nobody else is harmed."""
        case, engine = self._case, self._case.prefill[0]
        if not engine.cache or not case.chunk or answer.tokens < case.chunk:
            return Reuse(skipped="no cache to look into")
        if not case.dark:
            return Reuse(skipped="reuse is not tried on engines that serve")
        try:
            refused = self._drop(engine)
            if refused:
                return Reuse(skipped=f"reuse not tried: {refused}")
            before = self._sum("lmcache", [f"{engine.cache}/metrics"]).get("hit", 0.0)
            self._ask(engine.url, answer.prompt, f"{case.mark}-again")
            after = self._sum("lmcache", [f"{engine.cache}/metrics"]).get("hit", 0.0)
        except (Failed, NoAnswer, requests.RequestException) as error:
            return Reuse(skipped=f"reuse not tried: {self._http.told(error)[:SHOWN]}")
        return Reuse(hit=after - before, expected=case.chunk)

    def _drop(self, engine: Engine) -> str:
        """Drop an engine's own cache; why not, or "". vLLM answers 200 and `success: false` while blocks are held (0.32.0)."""
        end = self._clock() + LATE
        while True:
            status, text = self._http.post(f"{engine.url}/reset_prefix_cache", {}, PAGE)
            if status != 200:
                return f"the engine offers no reset of its cache ({status})"
            try:
                found = json.loads(text or "{}")
            except ValueError:
                found = {}
            if not isinstance(found, dict) or found.get("success", True):
                return ""
            if self._clock() > end:
                return f"the engine did not drop its cache in {LATE:.0f} s: blocks are held"
            time.sleep(PERIOD)


def _moved(before: Mapping[str, float], after: Mapping[str, float]) -> Moved:
    names = Moved.model_fields
    return Moved.model_validate({name: max(0.0, after.get(name, 0.0) - before.get(name, 0.0)) for name in names})


def _cache(before: Mapping[str, float] | str, after: Mapping[str, float] | str) -> Cache:
    for found in (after, before):
        if isinstance(found, str):
            return Cache(down=found[: 2 * SHOWN])
    assert not isinstance(before, str) and not isinstance(after, str)
    names = ("lookups", "written", "objects", "borrowed")
    return Cache.model_validate({name: max(0.0, after.get(name, 0.0) - before.get(name, 0.0)) for name in names})


def report(seen: Evidence) -> str:
    """Evidence as the termination message."""
    text = seen.model_dump_json(exclude_defaults=True)
    assert len(text.encode()) <= MAX_BYTES, text
    return text


def main(environ: Mapping[str, str] = os.environ, log: str = TERMINATION_LOG) -> int:
    """Run the case of the environment; 0 when everything was proven, 1 when something was not, 2 without a case."""
    if VARIABLE not in environ:
        print(f"pd-operator canary: {VARIABLE} is not set; it runs in a Job that the operator makes", file=sys.stderr)
        return 2
    case = Case.model_validate_json(environ[VARIABLE])
    seen = Canary(case, environ.get(KEY_VARIABLE, "")).run()
    with open(log, "w", encoding="utf-8") as file:
        file.write(report(seen))
    verdicts: list[tuple[str, Verdict]] = [("handoff", judge_handoff(seen))]
    if case.chunk:
        verdicts.append(("offload", judge_offload(seen)))
    for what, verdict in verdicts:
        print(f"{what}: {verdict.reason}: {verdict.sentence}")
    print(report(seen))
    return 0 if all(verdict.proven is not False for _, verdict in verdicts) else 1
