"""Stop a run early: on a signal, after the end of its launcher, or if a process stalls."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from datetime import timedelta
from types import FrameType

import psutil
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch.distributed import TCPStore

from ..console import EXIT_SIGNAL, Interrupted

# a closed terminal sends SIGHUP, which Windows does not have
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if name in dir(signal)]
# a launcher may forward a signal that the whole process group has already received, so signals
# within this time count as one request
SAME_REQUEST_SECONDS = 2.0
# longest interval between two heartbeats of a process
SECONDS_BETWEEN_HEARTBEATS = 2.0
# environment variables that show that torchrun, or accelerate alone, started this process
LAUNCHER_VARIABLES = ("LOCAL_RANK", "ACCELERATE_MIXED_PRECISION")
# environment variable with a process id; the run stops when this process ends
STARTER_VARIABLE = "VANILLA_TRANSFORMER_STARTER"
# program that waits for the end of the launcher, at most a minute, and then prints a text
PRINTING_PROGRAM = """
import contextlib, os, psutil, sys, time
text, end = sys.argv[1], time.monotonic() + 60
with contextlib.suppress(psutil.NoSuchProcess):
    launcher = psutil.Process(int(sys.argv[2]))
    # a launcher that has ended is a zombie until the program that started it notices
    while launcher.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
        time.sleep(0.1)
os.write(2, text.encode())
"""

_stores: list[TCPStore] = []


class StopRequests:
    """Requests to stop, from signals or because the launcher has ended.

    Args:
        prints_requests: Whether this process prints that the run ends after the current step.
    """

    def __init__(self, prints_requests: bool):
        self.prints_requests = prints_requests
        self.signal_number: int | None = None
        self._is_deferred = False
        is_launched = any(name in os.environ for name in LAUNCHER_VARIABLES)
        self._launcher = os.getppid() if is_launched else None
        starter = os.environ.get(STARTER_VARIABLE)
        self._starter = psutil.Process(int(starter)) if starter else None
        self._terminals = [number for number in (1, 2) if os.isatty(number)]

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Record the first request for `pending`, instead of raising `Interrupted`."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def pending(self) -> int | None:
        """Return the number of the signal that asked the process to stop, or None.

        The end of the launcher counts as SIGTERM, because nothing else would stop this process.
        """
        if self.signal_number is None and self._is_orphan():
            self.signal_number = signal.SIGTERM
        return self.signal_number

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
            frame: Interrupted stack frame, not used.

        Raises:
            Interrupted: If requests are not deferred.
        """
        if self.signal_number is not None:
            return
        self.signal_number = number
        # a write to a closed terminal would raise an error and end the run, so stdout and stderr
        # are redirected to the null device
        for terminal in self._terminals:
            if not os.isatty(terminal):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, terminal)
                os.close(nowhere)
        if not self._is_deferred:
            raise Interrupted(number)
        if self.prints_requests:
            # os.write needs no lock; a lock might be held by the code that the signal interrupted
            with contextlib.suppress(OSError):
                name = signal.Signals(number).name
                text = f"\n{name}: the run ends after this step. A second signal ends it at once.\n"
                os.write(2, text.encode())


@contextlib.contextmanager
def noticing_requests(prints_requests: bool = True) -> Iterator[StopRequests]:
    """Handle requests to stop until the block ends; an ignored signal stays ignored.

    Args:
        prints_requests: Whether this process prints that the run ends after the current step.

    Yields:
        The requests.
    """
    requests = StopRequests(prints_requests)
    # Python handles signals only in its main thread
    is_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS if is_main_thread}
    # nohup makes a process ignore SIGHUP, which must stay ignored
    handlers_before = {
        number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN
    }
    for number in handlers_before:
        signal.signal(number, requests.receive)
    try:
        with _exiting_on_second_signal(handlers_before):
            yield requests
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _exiting_on_second_signal(numbers: Collection[int]) -> Iterator[None]:
    """End the process at a second signal, also during a long operation.

    Python calls a handler only between two bytecode instructions, and a backward pass is a single
    one. So a thread reads the signals from a socket, to which Python's C code writes them at once.

    Args:
        numbers: Numbers of the signals that are handled; none for a thread other than the main one.
    """
    if not numbers:
        yield
        return
    reading_socket, writing_socket = socket.socketpair()
    with reading_socket, writing_socket:
        writing_socket.setblocking(False)
        descriptor_before = signal.set_wakeup_fd(writing_socket.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(
            target=_exit_on_second_signal, args=(reading_socket, numbers), daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor_before)
            writing_socket.shutdown(socket.SHUT_WR)
            thread.join()


def _exit_on_second_signal(reading_socket: socket.socket, numbers: Collection[int]):
    """Read the numbers of signals until the socket is closed; end the process at a second one."""
    first_time = None
    while received := reading_socket.recv(1):
        if received[0] not in numbers:
            continue
        if first_time is None:
            first_time = time.monotonic()
        elif time.monotonic() - first_time > SAME_REQUEST_SECONDS:
            os._exit(EXIT_SIGNAL + received[0])


def ignore_signals(worker: int):
    """Make a DataLoader worker ignore signals, because the run needs the worker until it saves.

    Args:
        worker: Number of the worker, not used.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def naming_a_dead_worker(num_workers: int) -> Iterator[None]:
    """Wait for torch's error about a dead DataLoader worker if reading from the worker fails first.

    The pipes of a killed process close a moment before its parent receives SIGCHLD. The handler of
    this signal raises torch's error, which names the worker.

    Args:
        num_workers: Number of workers.

    Raises:
        RuntimeError: If a worker died; torch raises this error in any call of the main thread.
    """
    try:
        yield
    except (EOFError, OSError):
        if num_workers:
            time.sleep(1)
        raise


def print_after_launcher(text: str):
    """Print a line on stderr after the end of the launcher, which first prints a traceback.

    Args:
        text: Line to print.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    command = [sys.executable, "-c", PRINTING_PROGRAM, f"{text}\n", str(os.getppid())]
    # a new session, so that a signal to the launcher's process group does not end this program
    subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)


@contextlib.contextmanager
def ending_if_stalled(minutes: float) -> Iterator[None]:
    """End this process with an error if another process of the run stalls.

    Without this check, all processes would wait for hours for a process that was stopped or whose
    machine is gone. A thread of each process regularly writes a heartbeat, a counter, to a TCPStore
    of the main process.

    Args:
        minutes: Heartbeat timeout in minutes.
    """
    state = PartialState()
    if state.num_processes == 1:
        yield
        return
    host, timeout = os.environ["MASTER_ADDR"], timedelta(minutes=minutes)
    port = [0]
    if state.is_main_process:
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        port = [store.port]
    broadcast_object_list(port)
    if not state.is_main_process:
        store = TCPStore(host, port[0], is_master=False, timeout=timeout)
    # keep the store after this block, because other processes may still use it
    _stores.append(store)
    store.set(str(state.process_index), "0")
    state.wait_for_everyone()
    watch = _StallWatch(store, state.process_index, state.num_processes, 60 * minutes)
    threads = [
        threading.Thread(target=method, daemon=True)
        for method in (watch.exchange_heartbeats, watch.end_if_stalled)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        watch.is_over.set()


class _StallWatch:
    """Heartbeats of the processes of a run, exchanged every few seconds."""

    def __init__(
        self, store: TCPStore, process_index: int, num_processes: int, max_silent_seconds: float
    ):
        self.store, self.process_index = store, process_index
        self.max_silent_seconds = max_silent_seconds
        self.names = [str(process) for process in range(num_processes)]
        self.interval = min(SECONDS_BETWEEN_HEARTBEATS, max_silent_seconds / 4)
        self.is_over = threading.Event()
        # last heartbeat of each process, and the time at which this process saw it change
        self.last_heartbeats = {name: (b"", time.monotonic()) for name in self.names}
        # time of the last answer of the store
        self.answer_time = time.monotonic()

    def exchange_heartbeats(self):
        """Send heartbeats of this process, and read those of all; a call may wait forever."""
        num_heartbeats = 0
        while not self.is_over.wait(self.interval):
            num_heartbeats += 1
            try:
                self.store.set(str(self.process_index), str(num_heartbeats))
                heartbeats = self.store.multi_get(self.names)
            except RuntimeError:
                # the main process, which hosts the store, has ended; the launcher ends the others
                self.is_over.set()
                return
            self.answer_time = time.monotonic()
            for name, heartbeat in zip(self.names, heartbeats, strict=True):
                if heartbeat != self.last_heartbeats[name][0]:
                    self.last_heartbeats[name] = (heartbeat, self.answer_time)

    def end_if_stalled(self):
        """End this process when another one has sent no heartbeat for too long."""
        last_check = time.monotonic()
        while not self.is_over.wait(self.interval):
            now = time.monotonic()
            # if this process itself was stopped, it has missed heartbeats of the others, so all
            # times begin anew
            if now - last_check > 4 * self.interval + 1:
                self.answer_time = now
                self.last_heartbeats = {
                    name: (value, now) for name, (value, _) in self.last_heartbeats.items()
                }
            last_check = now
            silent_processes = [
                int(name)
                for name, (_, change_time) in self.last_heartbeats.items()
                if now - change_time > self.max_silent_seconds
            ]
            # if the store does not answer, its host, the main process, counts as silent
            if now - self.answer_time > self.max_silent_seconds:
                silent_processes = [0]
            if silent_processes:
                _end_process(
                    silent_processes, self.process_index, self.max_silent_seconds, self.is_over
                )
                return


def _end_process(
    silent: list[int],
    process_index: int,
    max_silent_seconds: float,
    is_over: threading.Event,
):
    # the first live process prints the error while the others wait
    is_first = process_index == min({*range(process_index + 1)} - {*silent})
    if is_over.wait(0 if is_first else SECONDS_BETWEEN_HEARTBEATS):
        return
    if is_first:
        plural = "es" if len(silent) > 1 else ""
        text = (
            f"\nerror: process{plural} {', '.join(map(str, silent))} of the run sent no heartbeat "
            f"for {max_silent_seconds:,.0f} seconds (stall_minutes). The last checkpoint is "
            "intact: resume with --resume.\n"
        )
        os.write(2, text.encode())
    # an exception would have no effect, because the main thread waits for the stalled process
    os._exit(1)
