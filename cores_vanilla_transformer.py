"""CPU cores that other programs use too.

The threads of torch wait for one another after every operator. By default GNU's OpenMP lets a
waiting thread spin for milliseconds: on free cores this saves the time to wake it. Beside a busy
program it takes the core from the thread that it waits for, and a search becomes many times as
slow. The length of the spin is read once, when torch is imported. But while there are more OpenMP
threads than cores, OpenMP spins only 100 times instead of 300,000 (GNU libgomp manual,
GOMP_SPINCOUNT), so idle threads can shorten the spin at any time.
"""

import math
import os
import threading
import time
from pathlib import Path

import torch

# kernel statistics of each thread: the second number is the time that it waited for a core, in ns
TASKS = Path("/proc/self/task")
# settings of a user, which are left as they are
OWN_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# seconds over which the waiting time is measured, and for which cores must be free until threads
# spin again
WINDOW, CALM = 0.1, 1.0
# time for which all threads together waited for a core, in seconds per second. On free cores it is
# below FREE. When another program takes one of two cores it is above SHARED, whether our threads
# spin or sleep
FREE, SHARED = 0.1, 0.15
# a process that computes uses at least this share of a core
COMPUTING = 0.5
# elements of a tensor that torch divides among its threads
ELEMENTS_FOR_ALL_THREADS = 2**20


class SharedCores:
    """Makes waiting threads of OpenMP sleep while other programs need the cores.

    Attributes:
        is_shared: Whether another program needs the cores.
    """

    def __init__(self):
        self.is_shared = False
        self._lock = threading.Lock()
        # the first window says nothing
        self._time = -math.inf
        self._waited = self._computed = self._calm = 0.0
        self._end = threading.Event()
        can_tell = Path(TASKS, str(os.getpid()), "schedstat").exists()
        self._is_left_alone = not can_tell or any(name in os.environ for name in OWN_SETTINGS)

    def check(self):
        """Measure whether the cores are shared. Call this often while torch computes on a CPU."""
        if self._is_left_alone or time.perf_counter() - self._time < WINDOW:
            return
        # only one thread needs to measure
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._measure()
        finally:
            self._lock.release()

    def _measure(self):
        now, computed, waited = time.perf_counter(), time.process_time(), _seconds_waited()
        seconds = now - self._time
        share = (waited - self._waited) / seconds
        is_computing = computed - self._computed > COMPUTING * seconds
        self._time, self._computed, self._waited = now, computed, waited
        if not self.is_shared and share > SHARED:
            self.is_shared, self._calm = True, 0.0
            self._start_teams()
        elif self.is_shared and is_computing:
            self._calm = self._calm + seconds if share < FREE else 0.0
            if self._calm > CALM:
                self.is_shared = False
                self._stop_teams()

    def _start_teams(self):
        self._end = threading.Event()
        for _ in range(num_teams()):
            threading.Thread(target=_hold_team, args=(self._end,), daemon=True).start()

    def _stop_teams(self):
        self._end.set()


def num_teams() -> int:
    """Return how many idle teams give this process more threads than cores.

    Returns:
        Number of teams, each with all threads of torch but one; 0 if torch has one thread only.
    """
    num_threads, num_cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    if num_threads == 1:
        return 0
    return max(0, num_cores - num_threads) // (num_threads - 1) + 1


def _hold_team(end: threading.Event):
    """Start a team of OpenMP's threads, which ends with this thread."""
    torch.zeros(ELEMENTS_FOR_ALL_THREADS, device="cpu").add_(1)
    end.wait()


def _seconds_waited() -> float:
    nanoseconds = 0
    for task in os.listdir(TASKS):
        try:
            statistics = Path(TASKS, task, "schedstat").read_bytes()
        except OSError:
            # the thread has ended meanwhile
            continue
        nanoseconds += int(statistics.split()[1])
    return nanoseconds / 1e9


shared_cores = SharedCores()

__all__ = ["SharedCores", "num_teams", "shared_cores"]
