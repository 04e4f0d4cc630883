"""Time implementations in turn, piece by piece, so that the machine's load affects all alike.

On a shared machine, absolute times drift by tens of percent. The ratio of two times that are
measured one after the other does not.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..drawing import new_figure
from ..train.devices.cpu_kernels import product
from ..train.devices.memory import keep_freed_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEGABYTE = 1e6
# messages to the process of an implementation; any other message is the index of a piece of work
END = "end"
PEAK = "peak"
# rows and columns of the square matrices whose product measures the FLOP/s that a device reaches
MATRIX = {"cpu": 2048, "cuda": 8192}
# products in a row: a single product ends before a CPU reaches its full frequency
PRODUCTS = 10
# pictures with more plots than this have several columns
MOST_PLOTS_BELOW_EACH_OTHER = 4
COLUMNS = (
    "implementation",
    "ratio",
    "lower quartile",
    "upper quartile",
    "tokens/s",
    "share of matrix FLOP/s",
    "peak MB",
)


@dataclass(frozen=True)
class Implementation:
    """Implementation that does pieces of work in its own process.

    Each implementation has its own process: libraries cannot change each other's settings, and the
    memory of each can be measured.

    Attributes:
        name: Name in the tables.
        build: Function that runs in the process, and returns the function to be timed, which takes
            a piece.
        arguments: Arguments of `build`.
        pieces: Pieces of work, as many as the other implementations have.
        amounts: Amount of work in each piece, in tokens or another unit; only implementations with
            the same unit are compared.
        flops: Useful floating-point operations of each piece; empty if not counted.
    """

    name: str
    build: Callable[..., Callable[[Any], Any]]
    arguments: Sequence[Any]
    pieces: Sequence[Any]
    amounts: Sequence[float]
    flops: Sequence[float] = ()


@dataclass
class Result:
    """Measurements of an implementation.

    Attributes:
        name: Name of the implementation.
        seconds: Time of each piece in each round, in seconds, [rounds, pieces].
        rates: Amount of work per second, [rounds, pieces].
        flop_rates: Useful operations per second, or None if they are not counted, [rounds, pieces].
        peaks: Peak memory after each warm-up piece, and after all rounds, in bytes. On a CPU, the
            peak memory of the process minus its memory after the imports; on a GPU, the peak memory
            of torch's tensors.
    """

    name: str
    seconds: np.ndarray
    rates: np.ndarray
    flop_rates: np.ndarray | None
    peaks: Sequence[float]

    @property
    def peak(self) -> float:
        """Peak memory, in bytes."""
        return self.peaks[-1]

    def part(self, pieces: slice) -> "Result":
        """Return the measurements of some pieces.

        Args:
            pieces: Slice of the pieces.

        Returns:
            Times of these pieces; the peak memory is that of all pieces.
        """
        flop_rates = None if self.flop_rates is None else self.flop_rates[:, pieces]
        times = self.seconds[:, pieces], self.rates[:, pieces]
        return Result(self.name, *times, flop_rates, self.peaks)


def time_in_turn(
    implementations: Sequence[Implementation],
    rounds: int,
    device: torch.device,
    check: Callable[[dict[str, list[Any]]], Any] | None = None,
    warm_up: Sequence[int] = (0,),
) -> list[Result]:
    """Time implementations in turn: all of them do a piece before the next piece.

    Args:
        implementations: Implementations with the same number of pieces.
        rounds: Number of rounds; each does all pieces.
        device: Device of all implementations.
        check: Function that is called before the timing with the results of the warm-up pieces, by
            name of the implementation. The function raises an error if a result is wrong.
        warm_up: Indices of the warm-up pieces.

    Returns:
        The measurements, in the order of the implementations.
    """
    count = len(implementations[0].pieces)
    seconds = np.zeros((len(implementations), rounds, count))
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(implementation, device))
            for implementation in implementations
        ]
        outputs: dict[str, list[Any]] = {worker.name: [] for worker in workers}
        peaks: list[list[float]] = [[] for _ in workers]
        for worker, its_peaks in zip(workers, peaks, strict=True):
            for piece in warm_up:
                outputs[worker.name].append(worker.do(piece)[1])
                its_peaks.append(worker.peak())
        if check is not None:
            check(outputs)
        for turn in range(rounds):
            for piece in range(count):
                # rotate the order: each implementation is first, second, ... equally often
                for index in np.roll(np.arange(len(workers)), turn * count + piece):
                    seconds[index, turn, piece], _ = workers[index].do(piece)
        for worker, its_peaks in zip(workers, peaks, strict=True):
            its_peaks.append(worker.peak())
    return [
        Result(
            implementation.name,
            taken,
            np.asarray(implementation.amounts) / taken,
            np.asarray(implementation.flops) / taken if len(implementation.flops) else None,
            its_peaks,
        )
        for implementation, taken, its_peaks in zip(implementations, seconds, peaks, strict=True)
    ]


class Worker:
    """Process of an implementation.

    Args:
        implementation: Implementation that the process runs.
        device: Device of the implementation.

    Raises:
        RuntimeError: From `do` or `peak`, if the implementation failed; its error is on stderr.
    """

    def __init__(self, implementation: Implementation, device: torch.device):
        # spawn instead of fork, so that the process has its own threads and memory
        context = get_context("spawn")
        self.name = implementation.name
        self.connection, theirs = context.Pipe()
        arguments = (theirs, implementation, device.type, torch.get_num_threads())
        self.process = context.Process(target=_run_worker, args=arguments, daemon=True)

    def __enter__(self) -> "Worker":
        self.process.start()
        return self

    def __exit__(self, *error: Any) -> None:
        # without an error, wait until the process ends by itself, so that libraries release their
        # system resources; after an error, do not wait
        with suppress(OSError):
            self.connection.send(END)
        self.process.join(None if error[0] is None else 0)
        self.process.terminate()
        self.process.join()

    def do(self, piece: int) -> tuple[float, Any]:
        """Do one piece, and time it.

        Args:
            piece: Index of the piece.

        Returns:
            The time in seconds, and the result.
        """
        return self._request(piece)

    def peak(self) -> float:
        """Return the peak memory, in bytes."""
        return self._request(PEAK)

    def _request(self, message: int | str) -> Any:
        try:
            self.connection.send(message)
            while not self.connection.poll(1):
                if not self.process.is_alive():
                    break
            return self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            raise RuntimeError(
                f"{self.name} ended with exit {self.process.exitcode}; its error is above."
            ) from None


def _run_worker(connection: Connection, implementation: Implementation, device: str, threads: int):
    torch.set_num_threads(threads)
    gc.collect()
    # writing 5 resets the peak memory of the process
    Path("/proc/self/clear_refs").write_text("5")
    before = memory()
    work = implementation.build(*implementation.arguments)
    while True:
        message = connection.recv()
        if message == END:
            return
        if message == PEAK:
            # do not count the memory that the imports take
            added = memory()["peak"] - before["private"] - before["file_backed"]
            is_gpu = device == "cuda"
            connection.send(torch.cuda.max_memory_allocated() if is_gpu else added * MEGABYTE)
            continue
        piece = implementation.pieces[message]
        gc.collect()
        started = time.perf_counter()
        output = work(piece)
        if device == "cuda":
            torch.cuda.synchronize()
        connection.send((time.perf_counter() - started, output))


def matrix_product(device: torch.device, dtype: torch.dtype, pieces: int) -> Implementation:
    """Return an implementation that multiplies large matrices, to measure a device's FLOP/s.

    Args:
        device: Device of the matrices.
        dtype: Type of the matrices.
        pieces: Number of pieces, as many as the other implementations have.

    Returns:
        The implementation; its amounts of work are floating-point operations.
    """
    flops = [2.0 * PRODUCTS * MATRIX[device.type] ** 3] * pieces
    return Implementation("matrix product", Product, (device, dtype), range(pieces), flops, flops)


class Product:
    """Product of two large matrices; on a CPU by oneDNN or MKL, whichever is faster.

    Args:
        device: Device of the matrices.
        dtype: Type of the matrices.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype):
        if device.type == "cpu":
            keep_freed_memory()
        edge = MATRIX[device.type]
        self.matrices = torch.randn(2, edge, edge, device=device).to(dtype)

    def __call__(self, piece: int) -> None:
        """Multiply the matrices.

        Args:
            piece: Unused.
        """
        for _ in range(PRODUCTS):
            product(*self.matrices)


def ratios(result: Result, reference: Result) -> tuple[float, float, float]:
    """Return the speed of an implementation relative to another one.

    Args:
        result: Measurements of the implementation.
        reference: Measurements of the other implementation, from the same call of `time_in_turn`.

    Returns:
        Median and quartiles of the ratio, over pieces and rounds.
    """
    each = result.rates / reference.rates
    low, middle, high = np.quantile(each, (0.25, 0.5, 0.75))
    return float(middle), float(low), float(high)


def rows_of(results: Sequence[Result], reference: str, matrix: Result | None) -> list[tuple]:
    """Return a row of a table for each implementation.

    Args:
        results: Measurements of `time_in_turn`.
        reference: Name of the implementation that the others are compared with.
        matrix: Measurements of the matrix product from the same call, or None.

    Returns:
        Rows for `COLUMNS`.
    """
    (base,) = (result for result in results if result.name == reference)
    rows = []
    flops = None if matrix is None else matrix.flop_rates
    for result in results:
        share = None
        if flops is not None and result.flop_rates is not None:
            share = f"{np.median(result.flop_rates) / np.median(flops):.0%}"
        rows.append(
            (
                result.name,
                *ratios(result, base),
                float(np.median(result.rates)),
                share,
                round(result.peak / MEGABYTE),
            )
        )
    return rows


def numbers_of(results: Sequence[Result], matrix: Result | None) -> dict[str, Any]:
    """Return all measurements for the JSON file.

    Args:
        results: Measurements of `time_in_turn`.
        matrix: Measurements of the matrix product from the same call, or None.

    Returns:
        Time of each piece and round in seconds, peak memory, and the rate of the matrix product.
    """
    numbers: dict[str, Any] = {
        "seconds": {result.name: result.seconds.tolist() for result in results},
        "peak_bytes": {result.name: result.peak for result in results},
    }
    if matrix is not None and matrix.flop_rates is not None:
        numbers["matrix_product_flops_per_second"] = float(np.median(matrix.flop_rates))
    return numbers


def ratio_figure(tables: Mapping[str, Sequence[tuple]], reference: str) -> "Figure":
    """Draw the ratios as bars, one plot for each table.

    Args:
        tables: Rows from `rows_of`, by title.
        reference: Name of the implementation that the ratios refer to.

    Returns:
        The figure.
    """
    height = 0.9 + 0.3 * max(len(rows) for rows in tables.values())
    columns = 1 if len(tables) <= MOST_PLOTS_BELOW_EACH_OTHER else 3
    lines = -(-len(tables) // columns)
    figure, axes = new_figure(6.5 if columns == 1 else 13, height * lines, lines, columns)
    plots = np.ravel(axes)
    for plot in plots[len(tables) :]:
        plot.remove()
    furthest = max(row[3] for rows in tables.values() for row in rows)
    for plot, (title, rows) in zip(plots, tables.items(), strict=False):
        names = [row[0] for row in rows][::-1]
        middle, low, high = np.array([row[1:4] for row in rows][::-1]).T
        ours = ["tab:orange" if name.startswith("this package") else "tab:gray" for name in names]
        # rounding can put a quartile on the other side of the median, but no error bar is negative
        spread = np.maximum([middle - low, high - middle], 0)
        plot.barh(names, middle, xerr=spread, color=ours, height=0.6)
        plot.axvline(1, color="black", linewidth=0.8)
        # one scale for all plots, so that their bars can be compared
        plot.set(title=title, xlabel=f"times as fast as {reference}", xlim=(0, 1.05 * furthest))
    return figure


def memory() -> dict[str, float]:
    """Return the memory of this process, from /proc on Linux.

    Returns:
        Memory in MB: `private` (RssAnon), `file_backed` (RssFile), and `peak`, the highest total so
        far (VmHWM).
    """
    status = Path("/proc/self/status").read_text()
    names = {"private": "RssAnon", "file_backed": "RssFile", "peak": "VmHWM"}
    kilobyte = 1024
    return {
        name: int(status.split(f"{key}:")[1].split()[0]) * kilobyte / MEGABYTE
        for name, key in names.items()
    }
