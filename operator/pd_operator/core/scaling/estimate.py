"""Estimates: what a tick teaches. Rates, throughput of a prefill replica (V), KV per request (c), requests of a decode replica (b).

Nothing here starts from a profile: a V that is too low fills the GPUs with prefill and starves decode, and is never found out
since prefill then never saturates (facts of the study: a prior of a third lost 11 points of attainment at twice the GPUs).
"""

from __future__ import annotations

import math
from dataclasses import replace

from pd_operator.core.scaling.bounds import Bounds
from pd_operator.core.scaling.law import Law
from pd_operator.core.scaling.learned import DecodeLearned, Learned, PrefillLearned, Rate, average, significant
from pd_operator.core.scaling.readings import Readings, Signal

HOLT_LEVEL, HOLT_TREND, HOLT_DAMPING = 0.3, 0.1, 0.95  # facts: damped Holt on 15 s bins
GAIN = (0.5, 1.0)  # limits of the correction of tokens per prefill second: beyond them a counter is wrong, not an engine


def known(signal: Signal) -> float | None:
    """The value of a signal on which a decision may rest: known, finite, not negative."""
    return float(signal.value) if signal.known and math.isfinite(signal.value) and signal.value >= 0 else None


def elapsed(learned: Learned, now: float, bounds: Bounds) -> float:
    """Seconds since the last decision; one tick for the first one, or when the clock went back."""
    gone = bounds.tick if learned.time is None else now - learned.time
    return gone if gone > 0 else bounds.tick


def prefill_rates(readings: Readings, learned: PrefillLearned, law: Law, seconds: float) -> PrefillLearned:
    """A and lam."""
    return replace(
        learned,
        prompt_rate=_rate(learned.prompt_rate, known(readings.prompt_rate), seconds, law),
        request_rate=_rate(learned.request_rate, known(readings.request_rate), seconds, law),
    )


def _rate(previous: Rate | None, sample: float | None, seconds: float, law: Law) -> Rate | None:
    if sample is None:
        return previous
    if previous is None:
        return Rate(significant(sample), 0.0, significant(sample), 0.0)
    level = HOLT_LEVEL * sample + (1 - HOLT_LEVEL) * (previous.level + HOLT_DAMPING * previous.trend)
    trend = HOLT_TREND * (level - previous.level) + (1 - HOLT_TREND) * HOLT_DAMPING * previous.trend
    jumped = law.jump > 1 and not previous.mean / law.jump <= sample <= previous.mean * law.jump
    jumped = jumped and abs(sample - previous.mean) >= law.jump_deviations * math.sqrt(previous.variance)
    return Rate(
        mean=significant(sample) if jumped else average(previous.mean, sample, seconds, law.rate_window),
        variance=average(previous.variance, (sample - previous.mean) ** 2, seconds, 10 * law.rate_window),
        level=significant(level),
        trend=significant(trend),
    )


def forecast(rate: Rate, horizon: float, tick: float) -> float:
    """A rate `horizon` seconds ahead by damped Holt: level + trend (phi + phi^2 + ...)."""
    steps = max(0, round(horizon / tick))
    ahead = HOLT_DAMPING * (1 - HOLT_DAMPING**steps) / (1 - HOLT_DAMPING)
    return max(0.0, rate.level + rate.trend * ahead)


def throughput(readings: Readings, learned: PrefillLearned, law: Law, seconds: float, held_back: bool) -> PrefillLearned:
    """V = prompt tokens per second of prefill, corrected by what a replica did while every one had work waiting.

    `held_back`: decode is, or may be, the reason why prefill waits; such a window says nothing of V. Seconds of prefill are at
    most one a second and replica: some engines sum them over requests that run at once.
    """
    tokens, busy, queue = known(readings.prefill_rate), known(readings.prefill_seconds), known(readings.queued_tokens)
    ready, decay = readings.prefill.ready, math.exp(-seconds / law.throughput_window)
    total, spent = learned.tokens, learned.seconds
    if tokens is not None and busy is not None and ready > 0:
        total = significant(total * decay + tokens * seconds)
        spent = significant(spent * decay + min(busy, ready) * seconds)
    base = total / spent if total > 0 and spent > 0 else None
    gain, value = learned.gain, learned.throughput
    sample = _saturated(readings, learned, seconds) if not held_back else None
    if sample is not None and base is not None and tokens and busy:
        # Of the same window: a base that still remembers a faster engine must not pass for a loss of this one.
        now = sample * min(busy, ready) / tokens
        gain = min(GAIN[1], max(GAIN[0], average(gain, now, seconds, law.saturated_window)))
    elif sample is not None:
        value = average(value, sample, seconds, law.saturated_window)
    if base is not None:
        value = significant(base * gain)
    return replace(learned, throughput=value, tokens=total, seconds=spent, gain=gain, queue=queue, ready=ready)


def _saturated(readings: Readings, learned: PrefillLearned, seconds: float) -> float | None:
    """Prompt tokens per second and replica over a window in which every replica had work waiting; None otherwise."""
    ready = readings.prefill.ready
    if not readings.every_prefill_waiting or ready <= 0 or ready != learned.ready:
        return None
    done = known(readings.prefill_rate)
    if done is None:
        offered, queue = known(readings.prompt_rate), known(readings.queued_tokens)
        if offered is None or queue is None or learned.queue is None:
            return None
        done = offered - (queue - learned.queue) / seconds
    return done / ready if done > 0 else None


def held_back(readings: Readings, congested: bool) -> bool:
    """Whether decode is, or may be, why prefill waits: congested, or unknown, or half as many wait for it as run in it."""
    waiting, running = known(readings.handoff_waiting), known(readings.running)
    return congested or waiting is None or running is None or (waiting > 0 and waiting >= running / 2)


def decode_numbers(readings: Readings, learned: DecodeLearned, bounds: Bounds, law: Law, seconds: float) -> DecodeLearned:
    """c, C, OSL, x and the batch that holds the ITL objective."""
    running, kv, starts = known(readings.running), known(readings.kv_tokens), known(readings.decode_starts)
    output, capacity = known(readings.output_tokens), known(readings.kv_capacity)
    each = learned.kv_per_request
    if running is not None and kv and running >= law.kv_min_running:
        each = average(each, kv / running, seconds, law.kv_window)
    after = replace(
        learned,
        kv_capacity=significant(capacity) if capacity else learned.kv_capacity,
        kv_per_request=each,
        output=average(learned.output, output, seconds, law.rate_window) if output else learned.output,
        starts=average(learned.starts, starts, seconds, law.rate_window) if starts is not None else learned.starts,
        running=_spread(learned.running, running, seconds, law),
    )
    limit = _itl_batch(readings, after, bounds, law, seconds)
    return after if limit == after.itl_batch else replace(after, itl_batch=limit)


def _spread(previous: Rate | None, sample: float | None, seconds: float, law: Law) -> Rate | None:
    """Mean and variance of R's ticks, where the law looks at them."""
    if law.decode_tail <= 0 or sample is None:
        return previous
    if previous is None:
        return Rate(significant(sample))
    mean = average(previous.mean, sample, seconds, law.decode_tail_window)
    return Rate(mean, average(previous.variance, (sample - previous.mean) ** 2, seconds, law.decode_tail_window))


def kv_batch(learned: DecodeLearned, bounds: Bounds, law: Law) -> float:
    """Requests that one decode replica holds: min(max_num_seqs, u C / c)."""
    if not learned.kv_capacity:
        return float(bounds.max_num_seqs)
    per_request = learned.kv_per_request or law.kv_prior
    return max(1.0, min(float(bounds.max_num_seqs), law.kv_share * learned.kv_capacity / per_request))


def batch(learned: DecodeLearned, bounds: Bounds, law: Law) -> float:
    """b: requests that one decode replica runs inside its KV and inside the ITL objective."""
    held = kv_batch(learned, bounds, law)
    return held if learned.itl_batch is None else max(1.0, min(held, learned.itl_batch))


def _itl_batch(readings: Readings, learned: DecodeLearned, bounds: Bounds, law: Law, seconds: float) -> float | None:
    """Fall to the batch that would hold the objective were ITL proportional to it; grow slowly while ITL is below the margin.

    ITL is really d + e B, so the proportional guess falls too little, never too much, and a few ticks find the batch.
    """
    itl, running, ready, objective = known(readings.itl), known(readings.running), readings.decode.ready, bounds.slo_itl
    if itl is None or running is None or objective is None or ready <= 0 or itl <= 0:
        return learned.itl_batch
    now, most = running / ready, kv_batch(learned, bounds, law)
    if itl > law.itl_high * objective and now >= 1:
        limit = learned.itl_batch if learned.itl_batch is not None else most
        return significant(max(1.0, min(limit, now * max(law.itl_floor, law.itl_high * objective / itl))))
    if learned.itl_batch is None:
        return None
    if itl < law.itl_margin * objective:
        grown = learned.itl_batch * math.exp(seconds / law.itl_recovery)
        return None if grown >= most else significant(grown)
    return learned.itl_batch
