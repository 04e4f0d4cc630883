"""Runs on a file system that crashes: what was promised to be on the disk is there.

A crash is ext4's own: it drops all that was not synced, journal included, as a power loss does.
"""

import contextlib
import fcntl
import os
import random
import signal
import struct
import subprocess
import sys
import time

import datasets
import forked
import pytest
import train_toys
from train_toys import curve

from vanilla_transformer.loading import load_run
from vanilla_transformer.train.loop import train

pytestmark = [pytest.mark.power, pytest.mark.usefixtures("new_process")]

# of linux/ext4.h: EXT4_IOC_SHUTDOWN, and its flag that leaves the journal unwritten
SHUTDOWN = 0x8004587D
WITHOUT_JOURNAL = 2
STEPS = 24
# one crash in three comes at most this many seconds after the end of its run
AFTER_THE_END = 3.0


def run(*command):
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """Image of a file system, and its mount point."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system from a loop device")
    folder = tmp_path_factory.mktemp("disk")
    image, place = folder / "image", folder / "mounted"
    place.mkdir()
    image.write_bytes(bytes(96 * 2**20))
    try:
        run("mkfs.ext4", "-q", str(image))
        mount(image, place)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs ext4 and a free loop device: {error}")
    run("umount", str(place))
    return image, place


def mount(image, place):
    run("mount", "-o", "loop", str(image), str(place))


def crash(place):
    folder = os.open(place, os.O_RDONLY)
    try:
        fcntl.ioctl(folder, SHUTDOWN, struct.pack("I", WITHOUT_JOURNAL))
    finally:
        os.close(folder)


def settings_of(corpus, folder, **changes):
    return train_toys.toy_config(corpus, folder, max_steps=STEPS, save_every_steps=3, **changes)


def train_with_cache(config, cache):
    # the prepared text is on the disk that crashes too
    datasets.config.HF_DATASETS_CACHE = cache
    return 0 if train(config, resume=True) else 1


def start(config, cache):
    return forked.begin(train_with_cache, config, cache)


def crash_at(seconds, corpus, disk, settings, *, after_the_end):
    """Begin a run, crash its disk some seconds after its start or end, and mount the disk again.

    Returns whether the run had ended before.
    """
    image, place = disk
    process = start(settings_of(corpus, place / "run", **settings), place / "cache")
    if after_the_end:
        process.join()
        time.sleep(seconds)
    else:
        process.join(seconds)
    has_ended = process.exitcode == 0
    crash(place)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    run("umount", "--lazy", str(place))
    deadline = time.monotonic() + 20
    while subprocess.run(["losetup", "-j", str(image)], capture_output=True).stdout:
        assert time.monotonic() < deadline, "the disk is still in use"
        time.sleep(0.02)
    mount(image, place)
    return has_ended


@pytest.mark.parametrize(
    ("crashes", "settings"),
    [
        (3, {}),
        pytest.param(100, {}, marks=pytest.mark.slow),
        pytest.param(25, {"ema_decay": 0.9, "num_workers": 1}, marks=pytest.mark.slow),
        pytest.param(
            25,
            {"streaming": True, "block_pairs": 30, "tokens_per_step": 200},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_resumes_after_every_power_loss_as_if_there_had_been_none(
    corpus, tmp_path, disk, crashes, settings
):
    image, place = disk
    whole = tmp_path / "whole"
    begun = time.monotonic()
    process = start(settings_of(corpus, whole, **settings), tmp_path / "cache")
    process.join()
    assert process.exitcode == 0
    duration = time.monotonic() - begun
    rng = random.Random(crashes)
    for number in range(crashes):
        run("mkfs.ext4", "-q", "-F", str(image))
        mount(image, place)
        try:
            is_late = number % 3 == 2
            least, most = (0.0, AFTER_THE_END) if is_late else (0.05 * duration, duration)
            seconds = rng.uniform(least, most)
            has_ended = crash_at(seconds, corpus, disk, settings, after_the_end=is_late)
            assert has_ended or not is_late, f"crash {number}: the run failed before it"
            if has_ended:
                # what has ended well needs no other run
                train_toys.assert_same_bits(place / "run", whole)
                assert curve(place / "run") == curve(whole)
                load_run(place / "run")
            process = start(settings_of(corpus, place / "run", **settings), place / "cache")
            process.join()
            assert process.exitcode == 0, f"crash {number}: the run does not go on"
            for part in ("", f"checkpoints/step-{STEPS}"):
                train_toys.assert_same_bits(place / "run" / part, whole / part)
            assert curve(place / "run") == curve(whole)
        finally:
            run("umount", "--lazy", str(place))
