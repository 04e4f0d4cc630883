"""Shorter busy-waiting of OpenMP's threads while other programs use the CPU cores.

The threads of torch wait for one another after every operator. In GNU's OpenMP, a waiting thread
busy-waits (spins) for milliseconds, which on free cores saves the time to wake the thread. If
another program needs the core, a spinning thread takes CPU time from the thread that it waits for,
and a search becomes many times slower. OpenMP reads the spin count once, when torch is
imported: 300,000 by default. But OpenMP uses a count of 100 while it has more threads than there
are cores (oversubscription; GNU libgomp manual, GOMP_SPINCOUNT). So this module starts idle OpenMP
threads while the cores are shared, and ends these threads afterwards.
"""

import math
import os
import threading
import time
from pathlib import Path

import torch

# kernel statistics of each thread. The second number in `schedstat` is the run delay of the thread:
# the time for which it was ready and waited for a core, in ns
TASKS_FOLDER = Path("/proc/self/task")
# environment variables of the user: if one is set, this module does nothing
USER_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# length of one measurement, in seconds
MEASURING_SECONDS = 0.1
# seconds for which the cores must be free before threads spin again
CALM_SECONDS = 1.0
# thresholds of the run delay of all threads together, in seconds per second of wall time. On free
# cores the run delay is below the first threshold. If another program takes one of two cores, the
# run delay is above the second threshold, whether our threads spin or sleep
FREE_BELOW, SHARED_ABOVE = 0.1, 0.15
# smallest CPU time, in seconds per second, at which this process counts as computing
COMPUTING_ABOVE = 0.5
# number of elements of a tensor that is large enough for torch to use all of its threads
ELEMENTS_FOR_ALL_THREADS = 2**20


class SharedCores:
    """Monitor that makes waiting OpenMP threads sleep while other programs need the cores.

    Attributes:
        is_shared: Whether another program needs the cores.
    """

    def __init__(self):
        self.is_shared = False
        self._lock = threading.Lock()
        # the time since -inf is infinite, so that the first measurement finds a run delay of 0
        self._last_time = -math.inf
        self._last_total_delay = self._last_cpu_time = self._calm_seconds = 0.0
        self._teams_end = threading.Event()
        has_schedstat = Path(TASKS_FOLDER, str(os.getpid()), "schedstat").exists()
        self._is_disabled = not has_schedstat or any(name in os.environ for name in USER_VARIABLES)

    def update(self):
        """Measure whether the cores are shared, and start or end the idle OpenMP threads.

        Call this often while torch computes on a CPU.
        """
        if self._is_disabled or time.perf_counter() - self._last_time < MEASURING_SECONDS:
            return
        # another thread is measuring, and one measurement is enough
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._measure_and_switch()
        finally:
            self._lock.release()

    def _measure_and_switch(self):
        now, cpu_time, total_delay = time.perf_counter(), time.process_time(), _total_run_delay()
        seconds = now - self._last_time
        run_delay = (total_delay - self._last_total_delay) / seconds
        is_computing = cpu_time - self._last_cpu_time > COMPUTING_ABOVE * seconds
        self._last_time, self._last_cpu_time, self._last_total_delay = now, cpu_time, total_delay
        if not self.is_shared and run_delay > SHARED_ABOVE:
            self.is_shared, self._calm_seconds = True, 0.0
            self._start_idle_teams()
        elif self.is_shared and is_computing:
            self._calm_seconds = self._calm_seconds + seconds if run_delay < FREE_BELOW else 0.0
            if self._calm_seconds > CALM_SECONDS:
                self.is_shared = False
                self._teams_end.set()

    def _start_idle_teams(self):
        self._teams_end = threading.Event()
        for _ in range(num_teams()):
            threading.Thread(target=_hold_team, args=(self._teams_end,), daemon=True).start()


def num_teams() -> int:
    """Return the smallest number of idle teams with which OpenMP has more threads than cores.

    A team adds one thread fewer than torch has, because the thread that starts a team is a part
    of the team.

    Returns:
        Number of teams, at least one; 0 if torch has one thread only.
    """
    num_threads, num_cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    if num_threads == 1:
        return 0
    return max(0, num_cores - num_threads) // (num_threads - 1) + 1


def _hold_team(end: threading.Event):
    """Start a team of OpenMP threads, which lives as long as this thread, and wait for `end`."""
    torch.zeros(ELEMENTS_FOR_ALL_THREADS, device="cpu").add_(1)
    end.wait()


def _total_run_delay() -> float:
    nanoseconds = 0
    for task in os.listdir(TASKS_FOLDER):
        try:
            statistics = Path(TASKS_FOLDER, task, "schedstat").read_bytes()
        except OSError:
            # the thread has ended meanwhile
            continue
        nanoseconds += int(statistics.split()[1])
    return nanoseconds / 1e9


shared_cores = SharedCores()
