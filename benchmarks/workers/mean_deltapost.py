"""The weighted mean of a round's deltas with the sweep that merges in C, and nothing else of a close."""

from round_deltapost import aggregator, backend, contributions, state
from serving import serve

from deltapost.adapters.native_sweeps import native_sweeps
from deltapost.adapters.sweeps import Combination

specs = [aggregator.schema[name] for name in aggregator.names]
deltas = [one.tensors for one in contributions]
counts = [one.tokens for one in contributions]
combination = Combination(tuple(count / sum(counts) for count in counts))


def mean():
    sweeps = native_sweeps(backend, specs, state.theta, state.outer, deltas, None)
    if sweeps is None:
        raise SystemExit("deltapost was installed without its C kernels: see `deltapost doctor`")
    return sweeps.merge([combination] * len(specs), [0.0] * len(deltas))


serve(mean)
