"""How long threads of this process wait for the interpreter's lock."""

from __future__ import annotations

import time


class GilMeter:
    """Samples the wait: gives the lock up and counts how long it takes to get it back."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._num_samples = 0

    def sample(self) -> None:
        """Takes one sample; called by the clock, a few dozen times a second."""
        began = time.perf_counter()
        time.sleep(0)  # lets go of the lock and asks for it again
        self._total_s += time.perf_counter() - began
        self._num_samples += 1

    @property
    def average_us(self) -> float:
        """Mean of all samples, in microseconds."""
        return self._total_s / self._num_samples * 1e6 if self._num_samples else 0.0
