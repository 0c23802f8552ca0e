"""Which cases of the table of gradients stand for the others.

Cases that differ only by opset within one version of the rule, or by which axes are unknown, behave
alike. Of tables that cross all attributes (``CROSSED``) each value occurs with each rule and rank.
"""

from collections.abc import Iterable

from odtpack.autodiff import REGISTRY
from tests.autodiff.oracle import Case

# Tables that cross every attribute with every other.
CROSSED = {
    *("AveragePool", "Conv", "ConvTranspose", "GlobalLpPool", "GridSample", "LpPool", "MaxPool"),
    *("MaxUnpool", "Resize", "RoiAlign", "GRU", "LSTM", "RNN", "Pow", "DFT", "Col2Im"),
}


def rule_of(case: Case) -> tuple[str, str, int]:
    """Domain, operator and first opset of the rule that differentiates a case."""
    rule = REGISTRY.lookup(case.domain, case.op, case.opset if not case.domain else 1)
    return case.domain, case.op, rule.since


def representatives(table: Iterable[Case]) -> list[Case]:
    """Return the first case with each property that a rule may depend on."""
    seen: set[object] = set()
    found = []
    for case in table:
        whole = rule_of(case)
        new: set[object] = {(*whole, case.label, bool(case.batch), bool(case.symbols))}
        if case.op in CROSSED:
            rank = next(iter(case.present.values())).ndim
            open_ = bool(case.symbols)
            new = {(*whole, rank, open_, key, str(value)) for key, value in case.attrs.items()}
            new |= {(*whole, rank, open_), (*whole, tuple(case.present))}
            new |= {(*whole, tuple(case.differentiated)), (*whole, tuple(case.output_names))}
        if not new <= seen:
            seen |= new
            found.append(case)
    return found
