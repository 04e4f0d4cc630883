"""Damaged files end in a result or in one sentence: no traceback, crash, hang or silent error."""

import json
import os
import subprocess
import sys

import fuzzing
import pytest

# numbers of cases: in every test run, in total, and in one slow test
FEW, ALL, PART = 50, 10_000, 500


def in_process(*arguments):
    # one thread: the number of threads changes the last bit of a sum, and a fork needs a process
    # without threads
    settings = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, fuzzing.__file__, *map(str, arguments)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    in_process(folder)
    return folder


def check_cases(root, first, count):
    *faults, last = map(json.loads, in_process(root, first, count).splitlines())
    assert last["tried"] == count
    assert not faults, json.dumps(faults, indent=1)


def test_damaged_files_end_in_one_sentence(root):
    check_cases(root, 0, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, ALL, PART))
def test_ten_thousand_damaged_files_end_in_one_sentence(root, first):
    check_cases(root, first, PART)


def test_every_file_mutation_and_command_is_tried():
    cases = [fuzzing.case_of(seed) for seed in range(ALL)]
    assert {case.file for case in cases} == {file for file, _ in fuzzing.TARGETS}
    assert {case.mutation for case in cases} == {*fuzzing.CONTENT, *fuzzing.PLACES}
    assert {case.command for case in cases} == {*fuzzing.COMMANDS}
    assert cases[:20] == [fuzzing.case_of(seed) for seed in range(20)]
