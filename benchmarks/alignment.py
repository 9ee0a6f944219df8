"""How right the map of layers is that padiff finds by itself, what each kind of evidence is worth, and what it costs.

``--pairs``: every pair of ``tests/pairs`` has a true map: which layers that own parameters answer to each other. It is
set against the found one, all pairs' links counted together:

* precision: of the links found, the share that is true;
* recall: of the true links, the share that was found;
* right: for how many pairs the found map is the true one, no link more and none less.

A tied parameter's further name has no partner of its own where the other side has but one name: those links are left
out. Of some pairs only the order of execution tells the truth, as the first line says: from definitions they can't be
right but by luck.

Three columns of these: from the definitions alone; with what running both models once shows (order, output shapes),
from different weights, as ``assign_weight`` with inputs has it; and with a recorded step of both from equal weights, as
``compare`` has it. The first row has all evidence, the following ones lack one kind each: what a figure falls by is
what that kind alone is worth; where it does not fall, others tell the same. Evidence that a column does not have can't
be lost there. Shapes can't be switched off: what they forbid is never paired, in no row. The last row is the naive way:
shapes (and rows that add up), and the order of definition, nothing else. Below the table stand the links that are wrong
with all evidence.

``--growth``: seconds of the processor (other work on the machine does not count) to align generated trees of about so
many layers (the reference's; the table has the number), from definitions alone, with layers in a second, and the
exponent of growth from the size before (1: twice the layers take twice the time; 2: four times). A map that is not the
true one is told with the number of wrong and missing links.

    python benchmarks/alignment.py [--pairs] [--growth] [--sizes N ...] [--trees NAME ...] [--rounds 3]

Both parts by default. The pairs need torch and paddle, the trees numpy alone.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

from grown_trees import GROWN

from padiff.align import NOTHING_SEEN, Alignment, RuntimeEvidence, align
from padiff.align.matching import names
from padiff.align.matching.evidence import KINDS_OF_EVIDENCE
from padiff.records import Both

Links = frozenset[tuple[str, str]]

_VIEWS = ("definitions", "running once", "recorded runs")
_SIZES = (100, 300, 1000, 3000, 10_000)


def links_of(alignment: Alignment) -> Links:
    """Which layers of both sides have a parameter, or a part of one, in common."""
    return frozenset(
        (reference.layer, candidate.layer)
        for p in alignment.parameters
        for reference in p.reference
        for candidate in p.candidate
    )


# -- our pairs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A pair of models: both trees, what each view shows of them, and the truth."""

    name: str
    infos: tuple[Any, Any]
    seen: tuple[Both[RuntimeEvidence], ...]
    told: Links
    by_execution: bool

    @property
    def truth(self) -> Links:
        return self.told - self._further_names

    def found(self, view: int, without: Collection[str]) -> Links:
        return links_of(align(*self.infos, seen=self.seen[view], without=without)) - self._further_names

    @cached_property
    def _further_names(self) -> Links:
        """Links of a layer whose parameter is tied to one of another layer with the same partner."""
        first = [
            {layer.path: p.tied_to.rpartition("/")[0] for layer in info.layers for p in layer.parameters if p.tied_to}
            for info in self.infos
        ]
        return frozenset(
            (a, b) for a, b in self.told if {(first[0].get(a, ""), b), (a, first[1].get(b, ""))} & self.told
        )


@dataclass
class Score:
    """Counts over many pairs."""

    true: int = 0
    found: int = 0
    both: int = 0
    right: int = 0

    def add(self, truth: Links, found: Links) -> None:
        self.true += len(truth)
        self.found += len(found)
        self.both += len(truth & found)
        self.right += truth == found

    def __str__(self) -> str:
        precision, recall = self.both / max(self.found, 1), self.both / max(self.true, 1)
        return f"{precision:9.4f}  {recall:6.4f}  {self.right:5}"


def cases() -> Iterator[Case]:
    """Our pairs, each run."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from pairs import PAIRS

    import padiff
    from padiff.model.tree import LiveModel
    from padiff.weights.assign import Inputs, run_once

    def recorded(model: Any, args: tuple[Any, ...]) -> RuntimeEvidence:
        with padiff.record(model) as rec:
            model(*args)
            rec.try_dump()
        return RuntimeEvidence.from_step(rec.run.steps(0)[0])

    for pair in PAIRS:
        models = [model.eval() or model for model in pair.build()]
        given = pair.inputs()
        live = [LiveModel.from_model(model) for model in models]
        once = [RuntimeEvidence.from_step(run_once(model, Inputs.from_value(args))) for model, args in zip(live, given)]
        pair.transfer(*models)
        runs = [recorded(model, args) for model, args in zip(models, given)]
        seen = (NOTHING_SEEN, Both(*once), Both(*runs))
        infos = tuple(model.info for model in live)
        yield Case(pair.name, infos, seen, frozenset(pair.layers), pair.evidence == "execution")


def measure_pairs() -> None:
    known = list(cases())
    links, ran = sum(len(case.truth) for case in known), sum(case.by_execution for case in known)
    print(f"{len(known)} pairs, of {ran} only execution tells; {links} true links\n")
    heads = "".join(f" | {view:^24}" for view in _VIEWS)
    print(f"{'':20}{heads}")
    print(f"{'without':20}" + " | precision  recall  right" * len(_VIEWS))
    rows: list[tuple[str, tuple[str, ...]]] = [("(all evidence)", ())]
    rows += [(kind, (kind,)) for kind in KINDS_OF_EVIDENCE]
    rows.append(("all but order", tuple(kind for kind in KINDS_OF_EVIDENCE if kind != "order")))
    for name, without in rows:
        scores = [Score() for _ in _VIEWS]
        for case in known:
            for view, score in enumerate(scores):
                score.add(case.truth, case.found(view, without))
        print(f"{name:20}" + "".join(f" | {score}" for score in scores), flush=True)
    print("\nNot wholly right with all evidence:")
    for case in known:
        for view, title in enumerate(_VIEWS):
            which = " (only execution tells)" if case.by_execution else ""
            _tell(f"{case.name}{which}, {title}", case.truth, case.found(view, ()))


def _tell(what: str, truth: Links, found: Links, at_most: int = 6) -> None:
    if truth == found:
        return
    print(f"  {what}: {len(found - truth)} wrong, {len(truth - found)} missing")
    for title, links in (("wrong", found - truth), ("missing", truth - found)):
        for reference, candidate in sorted(links)[:at_most]:
            print(f"      {title}: {reference} - {candidate}")


# -- growth ----------------------------------------------------------------------------------------------------


def measure_growth(sizes: Iterable[int], trees: Iterable[str], rounds: int) -> None:
    print(f"{'tree':14} {'layers':>7} {'links':>7} {'seconds':>9} {'layers/s':>9} {'exponent':>8}  map")
    for name in trees:
        before: tuple[int, float] | None = None
        for size in sizes:
            grown = GROWN[name](size)
            count = len(grown.reference.layers)
            times = []
            for _ in range(rounds):
                names.read.cache_clear()
                start = time.process_time()
                alignment = align(grown.reference, grown.candidate)
                times.append(time.process_time() - start)
            took = statistics.median(times)
            exponent = math.log(took / before[1]) / math.log(count / before[0]) if before else math.nan
            found = links_of(alignment)
            wrong, missing = len(found - grown.truth), len(grown.truth - found)
            verdict = "right" if found == grown.truth else f"{wrong} wrong, {missing} missing"
            told = "" if before is None else f"{exponent:.2f}"
            row = f"{name:14} {count:7} {len(grown.truth):7} {took:9.3f} {count / took:9.0f} {told:>8}  {verdict}"
            print(row, flush=True)
            before = count, took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", action="store_true", help="precision and recall over our pairs")
    parser.add_argument("--growth", action="store_true", help="seconds by the number of layers")
    parser.add_argument("--sizes", type=int, nargs="+", default=_SIZES)
    parser.add_argument("--trees", nargs="+", choices=list(GROWN), default=list(GROWN))
    parser.add_argument("--rounds", type=int, default=3, help="the median of so many times")
    args = parser.parse_args()
    both = args.pairs == args.growth
    if args.pairs or both:
        measure_pairs()
    if both:
        print()
    if args.growth or both:
        measure_growth(args.sizes, args.trees, args.rounds)


if __name__ == "__main__":
    main()
