"""What a sorted run says."""

from __future__ import annotations

from collections.abc import Iterator

from padiff.golden.sorting import DRIFT, EQUAL, FAULT, Sorted

# Differences of the environment that are named.
_MOST = 6


def sorted_text(result: Sorted) -> Iterator[str]:
    """Yield the lines that say why a run is sorted as it is."""
    if result.reason:
        yield result.reason
    first, largest = result.first, result.largest
    if first is not None and largest is not None and result.sort != EQUAL:
        where = f"{first.site}, step {first.step}"
        yield f"first to move  {where}: by {first.error:.2g}, {first.units:.3g} units of its rounding noise"
        if result.sort == DRIFT:
            yield (
                f"largest        {largest.site}, step {largest.step}: {largest.share:.2g} times what rounding "
                f"explains, {largest.units:.3g} units"
            )
        elif largest.share > 1:
            beyond = next(each for each in result.moved if each.share > 1)
            yield (
                f"first beyond   {beyond.site}, step {beyond.step}: {beyond.share:.3g} times what rounding "
                f"explains, {beyond.units:.3g} units"
            )
    if result.sort == EQUAL:
        return
    if result.sort == DRIFT and first is None:
        yield "first to move  nothing: all tensors that both runs have are equal to the bit"
    changed = result.environment[:_MOST]
    for name in changed:
        yield f"changed        {name}"
    if len(result.environment) > _MOST:
        yield f"               and {len(result.environment) - _MOST} more"
    if not changed and result.sort != FAULT and first is not None:
        yield "changed        nothing that is known of the environment: the code computes in another order"
    if result.missing:
        few = f"{result.missing[0]}{f' and {len(result.missing) - 1} more' if len(result.missing) > 1 else ''}"
        yield f"not compared   the new run has not recorded {few}, which the golden run has (compiled code?)"
    if result.golden.left_out:
        yield f"not judged     left out of the golden run for its size: {result.golden.left_out}"
