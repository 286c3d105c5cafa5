"""Closes rounds with deltapost."""

from memory import peak, reset
from round_deltapost import BEFORE, aggregator, contributions, state
from serving import serve

serve(lambda: aggregator.close_round(state, contributions), before=lambda: BEFORE, reset=reset, peak=peak)
