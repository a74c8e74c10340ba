"""Load on a server over HTTP, closed loop or open; `python -m benchmarks.load_generator URL` is its command."""

from benchmarks.load_generator.plan import Arrivals, LoadPlan
from benchmarks.load_generator.run import run_load
from benchmarks.load_generator.tally import Sample, Tally

__all__ = ["Arrivals", "LoadPlan", "Sample", "Tally", "run_load"]
