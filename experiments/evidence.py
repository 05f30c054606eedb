"""Count ties, gains and losses of each residual connection in the stored runs, for `attnres list connections`.

The command needs no runs and no PyTorch: it reads the file that [`report`] writes from [`of`].
"""

from collections.abc import Iterable, Mapping
from typing import Any

from attnres.utils.intervals import TIE, Interval

from .declared import BASELINE
from .scratch import DeclaredComparison
from .tables import MINUS, markdown

FILE = "configuration/evidence.json"
COMPARED = "ablations-connections"  # has the most connections, each at its own best rate
# Fields that choose between forms of a connection that count as the connection itself.
FORMS = ("attn_res_block_size", "muddformer_way", "residual_streams_start")


def of(comparisons: Iterable[DeclaredComparison]) -> dict[str, dict[str, Any]]:
    """Return what the runs say of each connection that has any.

    Args:
        comparisons: The stored comparisons. Repetitions are left out.

    Returns:
        Name of the connection -> `experiments`, those that have it; `lower`, `tie` and `higher`, in how many the
        interval of the difference from the standard model lies below, around or above zero; and `loss`, the difference
        in the comparison of connections, if it is there. Of several forms the first one counts, never Full AttnRes.
    """
    found: dict[str, dict[float, Interval]] = {}
    losses: dict[str, str] = {}
    for comparison in comparisons:
        if comparison.store.path.stem != comparison.experiment.name:
            continue  # a repetition
        shown, compared = comparison.shown(), set()
        for label in shown.rates:
            form = dict(comparison.experiment.connections[label])
            name = form.pop("residual_connection", "attn_res")
            is_full = form.get("attn_res_block_size") == 1
            if form.keys() - {*FORMS} or is_full or name in compared or label == BASELINE:
                continue
            compared.add(name)
            interval = Interval.of(differences := shown.differences(label))
            if comparison.experiment.name == COMPARED:
                losses[name] = f"{interval.describe(3)}, n = {interval.count}"
            # Two experiments share the runs of some connections. These count once, by the experiment with more seeds.
            intervals = found.setdefault(name, {})
            if differences[0] not in intervals or interval.count > intervals[differences[0]].count:
                intervals[differences[0]] = interval
    return {
        name: {"experiments": len(intervals)}
        | {word: [i.verdict for i in intervals.values()].count(word) for word in ("lower", TIE, "higher")}
        | ({"loss": losses[name]} if name in losses else {})
        for name, intervals in found.items()
    }


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Tabulate what [`of`] returns."""
    words = ("lower", TIE, "higher")
    rows = [["name", "experiments here", *words, f"{MINUS}, all in one experiment"]]
    for name, told in found.items():
        counts = [str(told[key]) for key in ("experiments", *words)]
        rows.append([f"`{name}`", *counts, told.get("loss", "not compared there")])
    return markdown(rows)
