"""Waiting threads sleep while other programs need the cores, and spin otherwise."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from vanilla_transformer import cores_vanilla_transformer as cores
from vanilla_transformer.cores_vanilla_transformer import SharedCores

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="needs the scheduler statistics of Linux"
)


class Clock:
    """Seconds that passed, that the process computed, and that its threads waited for a core."""

    def __init__(self, monkeypatch):
        self.now = self.computed = self.waited = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "process_time", lambda: self.computed)
        monkeypatch.setattr(cores, "_total_run_delay", lambda: self.waited)

    def advance(self, seconds, waited, computed=1.0):
        """Let time pass, in which threads waited and computed for such shares of it."""
        self.now += seconds
        self.waited += waited * seconds
        self.computed += computed * seconds


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


@pytest.fixture
def shared(clock, monkeypatch):
    for name in cores.USER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    shared = SharedCores()
    monkeypatch.setattr(shared, "_start_idle_teams", lambda: None)
    shared.update()
    return shared


def test_a_busy_neighbor_is_found_within_a_window(shared, clock):
    clock.advance(1.01 * cores.MEASURING_SECONDS, waited=0.05)
    shared.update()
    assert not shared.is_shared
    clock.advance(1.01 * cores.MEASURING_SECONDS, waited=0.3)
    shared.update()
    assert shared.is_shared


def test_less_than_a_window_says_nothing(shared, clock):
    clock.advance(0.9 * cores.MEASURING_SECONDS, waited=1.0)
    shared.update()
    assert not shared.is_shared
    clock.advance(0.2 * cores.MEASURING_SECONDS, waited=0.0)
    shared.update()
    assert shared.is_shared


def test_threads_spin_again_when_the_cores_are_free_while_the_process_computes(shared, clock):
    clock.advance(1.01 * cores.MEASURING_SECONDS, waited=0.5)
    shared.update()
    # waiting for work says nothing about the cores
    clock.advance(60.0, waited=0.0, computed=0.01)
    shared.update()
    assert shared.is_shared
    clock.advance(0.6 * cores.CALM_SECONDS, waited=0.01)
    shared.update()
    # a short disturbance: the calm begins again
    clock.advance(1.01 * cores.MEASURING_SECONDS, waited=0.3)
    shared.update()
    clock.advance(0.6 * cores.CALM_SECONDS, waited=0.01)
    shared.update()
    assert shared.is_shared
    clock.advance(0.6 * cores.CALM_SECONDS, waited=0.01)
    shared.update()
    assert not shared.is_shared


@pytest.mark.parametrize("name", cores.USER_VARIABLES)
def test_the_setting_of_a_user_is_kept(name, clock, monkeypatch):
    monkeypatch.setenv(name, "passive" if "POLICY" in name else "5")
    shared = SharedCores()
    shared.update()
    clock.advance(1.0, waited=1.0)
    shared.update()
    assert not shared.is_shared


@pytest.mark.parametrize(
    ("num_threads", "num_cores", "num_teams"),
    [(1, 2, 0), (2, 2, 1), (2, 4, 3), (8, 16, 2), (16, 16, 1), (3, 4, 1), (16, 8, 1)],
)
def test_there_are_more_threads_than_cores(num_threads, num_cores, num_teams, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(num_cores))
    assert cores.num_teams() == num_teams
    if num_teams:
        # a team shares the thread that waits for it with nobody
        assert num_threads + num_teams * (num_threads - 1) > num_cores


SCRIPT = """
import os, subprocess, sys, time
import torch
from vanilla_transformer.cores_vanilla_transformer import shared_cores

def threads():
    return len(os.listdir("/proc/self/task"))

def compute_until(is_shared):
    end = time.monotonic() + 60
    while shared_cores.is_shared is not is_shared and time.monotonic() < end:
        x.add_(1)
        shared_cores.update()

x = torch.zeros(2**20)
x.add_(1)
alone = threads()
busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(4 * len(os.sched_getaffinity(0)))]
try:
    compute_until(True)
    assert shared_cores.is_shared
    time.sleep(0.5)
    beside = threads()
finally:
    for program in busy:
        program.kill()
shared_cores._teams_end.set()
time.sleep(0.5)
print(alone, beside, threads())
"""


def test_idle_threads_come_and_go():
    """libgomp's threads end with the thread that started their team."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}
    for name in cores.USER_VARIABLES:
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    alone, beside, after = map(int, done.stdout.split())
    num_teams = len(os.sched_getaffinity(0)) - 1
    # each team is a thread of Python and another one
    assert beside == alone + 2 * num_teams
    assert after == alone
