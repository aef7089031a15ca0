"""Counters and spans, cheap enough to be always on."""

from tensorwire.observe.counting import Counters, LiveCounters, counters, pickles_counted
from tensorwire.observe.spans import Spans, spans

__all__ = ["Counters", "LiveCounters", "Spans", "counters", "pickles_counted", "spans"]
