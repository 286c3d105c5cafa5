"""Closes rounds with gradientmail 0.0.2, in a Python of its own."""

from memory import peak, reset
from round_gradientmail import BEFORE, aggregator, contributions, state
from serving import serve

serve(lambda: aggregator.close_round(state, contributions), before=lambda: BEFORE, reset=reset, peak=peak)
