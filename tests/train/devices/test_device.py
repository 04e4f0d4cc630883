"""Search and training on a device that is not the processor: `stand_in_device.py` has it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import train_toys

# how often the host may wait before the first step and after the last
WAITS_OF_A_SEARCH = 25
# of tokens: a toy has many near ties
MOSTLY = 0.7
SEARCHES = ["greedy", "beam", "processed", "suppressed", "greedy suppressed"]


@pytest.fixture(scope="module")
def results():
    """Results on the CPU, and on the device."""
    result = subprocess.run(
        [sys.executable, Path(train_toys.__file__).parent / "stand_in_device.py"],
        env=train_toys.environment(),
        capture_output=True,
        text=True,
        timeout=train_toys.LONGEST_RUN,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_nothing_hinders_the_engine_on_a_device(results):
    assert results["found"]["refusal"] is None


@pytest.mark.parametrize("name", SEARCHES)
def test_a_device_finds_the_translations_of_the_cpu(results, name):
    assert results["found"][name]["ids"] == results["expected"][name]["ids"]


@pytest.mark.parametrize("name", SEARCHES)
def test_recorded_steps_find_the_translations_of_the_cpu(results, name):
    assert results["found"]["captured"][name]["ids"] == results["expected"][name]["ids"]


def test_a_graph_neither_waits_nor_copies_from_the_host(results):
    assert results["found"]["captured"]["graphs"] > len(SEARCHES)
    assert results["found"]["captured"]["impossible"] == {}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", SEARCHES)
def test_half_the_precision_finds_nearly_the_same(results, name, dtype):
    pairs = [
        pair
        for rows in zip(
            results["found"][dtype][name]["ids"], results["expected"][name]["ids"], strict=True
        )
        for pair in zip(*rows, strict=False)
    ]
    assert sum(ours == theirs for ours, theirs in pairs) > MOSTLY * len(pairs)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_waits_for_the_device_once_a_step(results, name):
    steps = len(results["found"][name]["ids"][0]) - 1
    assert steps <= results["found"][name]["waited"] <= steps + WAITS_OF_A_SEARCH


def test_a_training_step_is_the_same_on_a_device_and_never_waits(results):
    expected, found = results["expected"]["training"], results["found"]["training"]
    assert found["waited"] == 0
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
