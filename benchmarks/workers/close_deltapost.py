"""Closes rounds with deltapost."""

from round_deltapost import aggregator, contributions, state
from serving import serve

serve(lambda: aggregator.close_round(state, contributions))
