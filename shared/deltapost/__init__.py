"""deltapost: contributions over Redis streams, anchors in object storage, rounds in a SQL ledger.

A learner's program needs this module only::

    run = deltapost.join("my-run", model, deltapost.DiLoCo.streaming(), learner="a")
    ...
    run.count_step(tokens=...)
    run.publish_due(loss=...)
    run.align()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from deltapost.algorithms.diloco import DiLoCo, Median, NormClipped, Rda, TrimmedMean, WeightedMean
    from deltapost.algorithms.partition import ByBytes, ByPattern, Strided
    from deltapost.errors import DeltapostError
    from deltapost.learner.joining import join
    from deltapost.learner.progress import Aligned
    from deltapost.learner.publishing import Receipt
    from deltapost.learner.session import Run

__all__ = [
    "Aligned",
    "ByBytes",
    "ByPattern",
    "DeltapostError",
    "DiLoCo",
    "Median",
    "NormClipped",
    "Rda",
    "Receipt",
    "Run",
    "Strided",
    "TrimmedMean",
    "WeightedMean",
    "__version__",
    "join",
    "publish_contribution",
]

#: Where each public name lives: imported when it is first used, so that services load no learner code.
_HOMES = {
    "Aligned": "deltapost.learner.progress",
    "ByBytes": "deltapost.algorithms.partition",
    "ByPattern": "deltapost.algorithms.partition",
    "DeltapostError": "deltapost.errors",
    "DiLoCo": "deltapost.algorithms.diloco",
    "Median": "deltapost.algorithms.diloco",
    "NormClipped": "deltapost.algorithms.diloco",
    "Rda": "deltapost.algorithms.diloco",
    "Receipt": "deltapost.learner.publishing",
    "Run": "deltapost.learner.session",
    "Strided": "deltapost.algorithms.partition",
    "TrimmedMean": "deltapost.algorithms.diloco",
    "WeightedMean": "deltapost.algorithms.diloco",
    "join": "deltapost.learner.joining",
}


def publish_contribution(run: Run, fragment: int, version: int, **arguments: Any) -> Receipt:
    """`run.publish_contribution(fragment, version, …)`, as a function."""
    return run.publish_contribution(fragment, version, **arguments)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'deltapost' has no attribute {name!r}")
