"""Pool totals split over slices: decode by largest remainder on capacity, then prefill nearest the pool's ratio."""

from __future__ import annotations

from collections.abc import Sequence


def apportion(total: int, weights: Sequence[int], least: int = 1) -> list[int]:
    """Whole numbers that sum to `total`, in proportion to `weights`, each at least `least`: largest remainder (Hamilton).

    Of equal remainders the earlier wins. Weights of zero alone count as equal.

    Raises:
        ValueError: `total` is too small to give `least` to each.
    """
    if total < least * len(weights):
        raise ValueError(f"total={total}: must be at least {least * len(weights)} to give {least} to each of {len(weights)}")
    if not weights:
        return []
    weights = weights if any(weights) else [1] * len(weights)
    given = [least] * len(weights)
    sharing = list(range(len(weights)))
    left = total
    while small := [i for i in sharing if weights[i] * left < least * sum(weights[j] for j in sharing)]:
        left -= least * len(small)  # these get the least, the others share the rest
        sharing = [i for i in sharing if i not in small]
    whole = sum(weights[i] for i in sharing)
    parts = {i: divmod(weights[i] * left, whole) for i in sharing}
    for i, (share, _) in parts.items():
        given[i] = share
    for i in sorted(sharing, key=lambda i: (-parts[i][1], i))[: total - sum(given)]:
        given[i] += 1
    return given


def split_pools(prefill: int, decode: int, weights: Sequence[int]) -> list[tuple[int, int]]:
    """(prefill, decode) for each slice: decode in proportion to the slices' capacity, prefill in proportion to their decode.

    Raises:
        ValueError: there are more slices than prefill or decode replicas.
    """
    d = apportion(decode, weights)
    return list(zip(apportion(prefill, d), d, strict=True))
