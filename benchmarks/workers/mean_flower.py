"""The weighted mean of learners' arrays with Flower's `aggregate`, in an environment of its own."""

from flwr.server.strategy.aggregate import aggregate
from numbers_of_a_round import NAMES, delta
from serving import GIVEN, serve

learners = [delta(learner) for learner in range(GIVEN["learners"])]
# Arrays of each tensor's own, as a server has them from its clients.
results = [([one.copy() for _ in NAMES], 1_000 + learner) for learner, one in enumerate(learners)]
serve(lambda: aggregate(results))
