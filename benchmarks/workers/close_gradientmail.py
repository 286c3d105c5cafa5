"""Closes rounds with gradientmail 0.0.2, in a Python of its own."""

from round_gradientmail import aggregator, contributions, state
from serving import serve

serve(lambda: aggregator.close_round(state, contributions))
