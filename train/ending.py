"""End a run before its last step: on a signal, without its launcher, or with a stalled process."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType

import psutil
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch.distributed import TCPStore

from ..console import Interrupted

# a terminal that is closed sends SIGHUP, which Windows does not have
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if name in dir(signal)]
# a launcher passes on a signal that the whole process group has got already
SAME_REQUEST_SECONDS = 2.0
SECONDS_BETWEEN_SIGNS = 2.0
# by these a process knows that torchrun, or accelerate alone, has started it
LAUNCHED = ("LOCAL_RANK", "ACCELERATE_MIXED_PRECISION")
# the process that started the launcher, where that one is to end with it
STARTER = "VANILLA_TRANSFORMER_STARTER"
# waits for the launcher's end, which is after that of all processes, and for no longer
SAY_AFTER = """
import os, sys, time
text, launcher = sys.argv[1], int(sys.argv[2])
for _ in range(600):
    time.sleep(0.1)
    try:
        os.kill(launcher, 0)
    except OSError:
        break
os.write(2, text.encode())
"""

_stores: list[TCPStore] = []


class Requests:
    """Requests to end, from signals and from a launcher that is gone.

    Args:
        is_told: Whether this process tells the user what a request does.
    """

    def __init__(self, is_told: bool):
        self.is_told = is_told
        self.number: int | None = None
        self._when = 0.0
        self._is_deferred = False
        is_launched = any(name in os.environ for name in LAUNCHED)
        self._launcher = os.getppid() if is_launched else None
        starter = os.environ.get(STARTER)
        self._starter = psutil.Process(int(starter)) if starter else None
        self._terminals = [number for number in (1, 2) if os.isatty(number)]

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the first request wait until `pending` is asked, instead of ending the block."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def pending(self) -> int | None:
        """Return the number of the signal that asked the process to end, or None.

        A launcher that is gone counts as SIGTERM: nobody else would end this process.
        """
        if self.number is None and self._is_orphan():
            self.number = signal.SIGTERM
        return self.number

    def _is_orphan(self) -> bool:
        if self._launcher not in (None, os.getppid()):
            return True
        if self._starter is None:
            return False
        try:
            return self._starter.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def receive(self, number: int, frame: FrameType | None):
        """Handle a signal.

        Args:
            number: Number of the signal.
            frame: Not used.

        Raises:
            Interrupted: If requests are not deferred.
        """
        if self.number is not None:
            if time.monotonic() - self._when > SAME_REQUEST_SECONDS:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.number, self._when = number, time.monotonic()
        # a write to a terminal that was closed would end the run
        for terminal in self._terminals:
            if not os.isatty(terminal):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, terminal)
                os.close(nowhere)
        if not self._is_deferred:
            raise Interrupted(number)
        if self.is_told:
            # the handler must not wait for a lock that the interrupted code holds
            with contextlib.suppress(OSError):
                name = signal.Signals(number).name
                text = f"\n{name}: the run ends after this step. A second signal ends it at once.\n"
                os.write(2, text.encode())


@contextlib.contextmanager
def noticing_requests(is_told: bool = True) -> Iterator[Requests]:
    """Notice requests to end until the block ends; a signal that is ignored stays ignored.

    Args:
        is_told: Whether this process tells the user what a request does.

    Yields:
        The requests.
    """
    requests = Requests(is_told)
    # Python handles signals in its main thread alone
    is_main = threading.current_thread() is threading.main_thread()
    found = {number: signal.getsignal(number) for number in SIGNALS if is_main}
    # as nohup has it
    before = {number: it for number, it in found.items() if it != signal.SIG_IGN}
    for number in before:
        signal.signal(number, requests.receive)
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_signals_to_the_run(worker: int):
    """Let a DataLoader worker ignore what asks the run to end: without it the run cannot save.

    Args:
        worker: Number of the worker, not used.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def naming_a_dead_worker(workers: int) -> Iterator[None]:
    """Let torch say that a DataLoader worker died, where reading from it failed first.

    The pipes of a process that is killed are closed a moment before its parent hears of its end.

    Args:
        workers: Number of workers.

    Raises:
        RuntimeError: If a worker died; torch raises it in whatever this process does.
    """
    try:
        yield
    except (EOFError, OSError):
        if workers:
            time.sleep(1)
        raise


def say_last(text: str):
    """Say something on stderr after the launcher of several processes has ended with a traceback.

    Args:
        text: One line.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    command = [sys.executable, "-c", SAY_AFTER, f"{text}\n", str(os.getppid())]
    # what ends the launcher's processes must not end it
    subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)


@contextlib.contextmanager
def ending_with_the_stalled(minutes: float) -> Iterator[None]:
    """End this process, with one sentence, if another one of the run gives no sign for a while.

    A process that was stopped, or whose machine is gone, would leave the others waiting for it. A
    thread of each process gives a sign through a store of the main process.

    Args:
        minutes: Time without a sign that ends the run.
    """
    state = PartialState()
    if state.num_processes == 1:
        yield
        return
    host, timeout = os.environ["MASTER_ADDR"], timedelta(minutes=minutes)
    port = [None]
    if state.is_main_process:
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        port = [store.port]
    broadcast_object_list(port)
    if not state.is_main_process:
        store = TCPStore(host, port[0], is_master=False, timeout=timeout)
    # others may ask it for a moment longer
    _stores.append(store)
    store.set(str(state.process_index), "0")
    state.wait_for_everyone()
    watch = _Watch(store, state.process_index, state.num_processes, 60 * minutes)
    threads = [threading.Thread(target=it, daemon=True) for it in (watch.exchange, watch.judge)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        watch.is_over.set()


class _Watch:
    """Signs of the processes of a run: each gives one every few seconds, and sees the others'."""

    def __init__(self, store: TCPStore, own: int, count: int, seconds: float):
        self.store, self.own, self.seconds = store, own, seconds
        self.names = [str(process) for process in range(count)]
        self.interval = min(SECONDS_BETWEEN_SIGNS, seconds / 4)
        self.is_over = threading.Event()
        # the last sign of each process, and when it was new
        self.seen = {name: (b"", time.monotonic()) for name in self.names}
        self.answered = time.monotonic()

    def exchange(self):
        """Give signs and read those of the others; the store may never answer."""
        sign = 0
        while not self.is_over.wait(self.interval):
            sign += 1
            try:
                self.store.set(str(self.own), str(sign))
                found = self.store.multi_get(self.names)
            except RuntimeError:
                # the main process, which has the store, has ended: its launcher ends the others
                self.is_over.set()
                return
            self.answered = time.monotonic()
            for name, value in zip(self.names, found, strict=True):
                if value != self.seen[name][0]:
                    self.seen[name] = (value, self.answered)

    def judge(self):
        """End this process when another one has given no sign for too long."""
        last = time.monotonic()
        while not self.is_over.wait(self.interval):
            now = time.monotonic()
            # where this process was stopped itself, it has not seen the others' signs
            if now - last > 4 * self.interval + 1:
                self.answered = now
                self.seen = {name: (value, now) for name, (value, _) in self.seen.items()}
            last = now
            silent = [int(name) for name, (_, new) in self.seen.items() if now - new > self.seconds]
            if now - self.answered > self.seconds:
                silent = [0]
            if silent:
                _end_without(silent, self.own, self.seconds, self.is_over)
                return


def _end_without(silent: list[int], own: int, seconds: float, is_over: threading.Event):
    # the first one left speaks, and the others give it the time to
    is_first = own == min({*range(own + 1)} - {*silent})
    if is_over.wait(0 if is_first else SECONDS_BETWEEN_SIGNS):
        return
    if is_first:
        plural = "es" if len(silent) > 1 else ""
        text = (
            f"\nerror: process{plural} {', '.join(map(str, silent))} of the run gave no sign for "
            f"{seconds:,.0f} seconds (stall_minutes). The last checkpoint is intact: resume with "
            "--resume.\n"
        )
        os.write(2, text.encode())
    # the main thread waits for the silent one, and would not hear an exception
    os._exit(1)


__all__ = [
    "SIGNALS",
    "STARTER",
    "Requests",
    "ending_with_the_stalled",
    "leave_signals_to_the_run",
    "naming_a_dead_worker",
    "noticing_requests",
    "say_last",
]
