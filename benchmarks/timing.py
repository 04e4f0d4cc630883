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
# unit of the memory in /proc
KIBIBYTE = 1024
# messages to the process of an implementation; any other message is the index of a piece of work
END = "end"
PEAK = "peak"
# rows and columns of the square matrices whose product measures the FLOP/s that a device reaches
MATRIX_EDGE = {"cpu": 2048, "cuda": 8192}
# products in a row: a single product ends before a CPU reaches its full frequency
PRODUCTS_PER_PIECE = 10
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
        build: Function that is called once in the process. It returns the function to be timed;
            that function takes one piece.
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

    def select_pieces(self, piece_slice: slice) -> "Result":
        """Return the measurements of some pieces.

        Args:
            piece_slice: Slice of the pieces.

        Returns:
            Times of these pieces; the peak memory is that of all pieces.
        """
        flop_rates = None if self.flop_rates is None else self.flop_rates[:, piece_slice]
        times = self.seconds[:, piece_slice], self.rates[:, piece_slice]
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
    num_pieces = len(implementations[0].pieces)
    seconds = np.zeros((len(implementations), rounds, num_pieces))
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(implementation, device))
            for implementation in implementations
        ]
        outputs: dict[str, list[Any]] = {worker.name: [] for worker in workers}
        peaks: list[list[float]] = [[] for _ in workers]
        for worker, worker_peaks in zip(workers, peaks, strict=True):
            for piece_index in warm_up:
                outputs[worker.name].append(worker.do(piece_index)[1])
                worker_peaks.append(worker.peak())
        if check is not None:
            check(outputs)
        for round_index in range(rounds):
            for piece_index in range(num_pieces):
                # rotate the order: each implementation is first, second, ... about equally often
                order = np.roll(np.arange(len(workers)), round_index * num_pieces + piece_index)
                for worker_index in order:
                    piece_seconds, _ = workers[worker_index].do(piece_index)
                    seconds[worker_index, round_index, piece_index] = piece_seconds
        for worker, worker_peaks in zip(workers, peaks, strict=True):
            worker_peaks.append(worker.peak())
    return [
        Result(
            implementation.name,
            implementation_seconds,
            np.asarray(implementation.amounts) / implementation_seconds,
            np.asarray(implementation.flops) / implementation_seconds
            if len(implementation.flops)
            else None,
            worker_peaks,
        )
        for implementation, implementation_seconds, worker_peaks in zip(
            implementations, seconds, peaks, strict=True
        )
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
        self.connection, worker_connection = context.Pipe()
        worker_arguments = (worker_connection, implementation, device.type, torch.get_num_threads())
        self.process = context.Process(target=_run_worker, args=worker_arguments, daemon=True)

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

    def do(self, piece_index: int) -> tuple[float, Any]:
        """Do one piece, and time it.

        Args:
            piece_index: Index of the piece.

        Returns:
            The time in seconds, and the result.
        """
        return self._request(piece_index)

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


def _run_worker(
    connection: Connection, implementation: Implementation, device: str, num_threads: int
):
    torch.set_num_threads(num_threads)
    gc.collect()
    # writing 5 resets the peak memory of the process
    Path("/proc/self/clear_refs").write_text("5")
    memory_before = memory()
    run_piece = implementation.build(*implementation.arguments)
    while True:
        request = connection.recv()
        if request == END:
            return
        if request == PEAK:
            # do not count the memory that the imports take
            added_megabytes = (
                memory()["peak"] - memory_before["private"] - memory_before["file_backed"]
            )
            is_gpu = device == "cuda"
            connection.send(
                torch.cuda.max_memory_allocated() if is_gpu else added_megabytes * MEGABYTE
            )
            continue
        piece = implementation.pieces[request]
        gc.collect()
        started = time.perf_counter()
        output = run_piece(piece)
        if device == "cuda":
            torch.cuda.synchronize()
        connection.send((time.perf_counter() - started, output))


def build_matrix_product(
    device: torch.device, dtype: torch.dtype, num_pieces: int
) -> Implementation:
    """Return an implementation that multiplies large matrices, to measure a device's FLOP/s.

    Args:
        device: Device of the matrices.
        dtype: Type of the matrices.
        num_pieces: Number of pieces, as many as the other implementations have.

    Returns:
        The implementation; its amounts of work are floating-point operations.
    """
    flops = [2.0 * PRODUCTS_PER_PIECE * MATRIX_EDGE[device.type] ** 3] * num_pieces
    return Implementation(
        "matrix product",
        MatrixProduct,
        (device, dtype),
        range(num_pieces),
        amounts=flops,
        flops=flops,
    )


class MatrixProduct:
    """Product of two large matrices; on a CPU by oneDNN or MKL, whichever is faster.

    Args:
        device: Device of the matrices.
        dtype: Type of the matrices.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype):
        if device.type == "cpu":
            keep_freed_memory()
        edge = MATRIX_EDGE[device.type]
        self.matrices = torch.randn(2, edge, edge, device=device).to(dtype)

    def __call__(self, piece: int) -> None:
        """Multiply the matrices.

        Args:
            piece: Unused.
        """
        for _ in range(PRODUCTS_PER_PIECE):
            product(*self.matrices)


def ratios(result: Result, reference: Result) -> tuple[float, float, float]:
    """Return the speed of an implementation relative to another one.

    Args:
        result: Measurements of the implementation.
        reference: Measurements of the other implementation, from the same call of `time_in_turn`.

    Returns:
        Median and quartiles of the ratio, over pieces and rounds.
    """
    speed_ratios = result.rates / reference.rates
    lower, median, upper = np.quantile(speed_ratios, (0.25, 0.5, 0.75))
    return float(median), float(lower), float(upper)


def rows_of(results: Sequence[Result], reference: str, matrix_result: Result | None) -> list[tuple]:
    """Return a row of a table for each implementation.

    Args:
        results: Measurements of `time_in_turn`.
        reference: Name of the implementation that the others are compared with.
        matrix_result: Measurements of the matrix product from the same call, or None.

    Returns:
        Rows for `COLUMNS`.
    """
    (reference_result,) = (result for result in results if result.name == reference)
    rows = []
    matrix_flop_rates = None if matrix_result is None else matrix_result.flop_rates
    for result in results:
        matrix_share = None
        if matrix_flop_rates is not None and result.flop_rates is not None:
            matrix_share = f"{np.median(result.flop_rates) / np.median(matrix_flop_rates):.0%}"
        rows.append(
            (
                result.name,
                *ratios(result, reference_result),
                float(np.median(result.rates)),
                matrix_share,
                round(result.peak / MEGABYTE),
            )
        )
    return rows


def numbers_of(results: Sequence[Result], matrix_result: Result | None) -> dict[str, Any]:
    """Return all measurements for the JSON file.

    Args:
        results: Measurements of `time_in_turn`.
        matrix_result: Measurements of the matrix product from the same call, or None.

    Returns:
        Time of each piece and round in seconds, peak memory, and the rate of the matrix product.
    """
    numbers: dict[str, Any] = {
        "seconds": {result.name: result.seconds.tolist() for result in results},
        "peak_bytes": {result.name: result.peak for result in results},
    }
    if matrix_result is not None and matrix_result.flop_rates is not None:
        numbers["matrix_product_flops_per_second"] = float(np.median(matrix_result.flop_rates))
    return numbers


def ratio_figure(tables: Mapping[str, Sequence[tuple]], reference: str) -> "Figure":
    """Draw the ratios as bars, one plot for each table.

    Args:
        tables: Rows from `rows_of`, by title.
        reference: Name of the implementation that the ratios refer to.

    Returns:
        The figure.
    """
    plot_height = 0.9 + 0.3 * max(len(rows) for rows in tables.values())
    num_columns = 1 if len(tables) <= MOST_PLOTS_BELOW_EACH_OTHER else 3
    num_plot_rows = -(-len(tables) // num_columns)
    figure, axes = new_figure(
        6.5 if num_columns == 1 else 13, plot_height * num_plot_rows, num_plot_rows, num_columns
    )
    plots = np.ravel(axes)
    for plot in plots[len(tables) :]:
        plot.remove()
    largest_quartile = max(upper for rows in tables.values() for _, _, _, upper, *_ in rows)
    for plot, (title, rows) in zip(plots, tables.items(), strict=False):
        names = [row[0] for row in rows][::-1]
        medians, lower, upper = np.array([row[1:4] for row in rows][::-1]).T
        bar_colors = [
            "tab:orange" if name.startswith("this package") else "tab:gray" for name in names
        ]
        # rounding can put a quartile on the other side of the median, but no error bar is negative
        error_bars = np.maximum([medians - lower, upper - medians], 0)
        plot.barh(names, medians, xerr=error_bars, color=bar_colors, height=0.6)
        plot.axvline(1, color="black", linewidth=0.8)
        # one scale for all plots, so that their bars can be compared
        plot.set(
            title=title, xlabel=f"times as fast as {reference}", xlim=(0, 1.05 * largest_quartile)
        )
    return figure


def memory() -> dict[str, float]:
    """Return the memory of this process, from /proc on Linux.

    Returns:
        Memory in MB: `private` (RssAnon), `file_backed` (RssFile), and `peak`, the highest total so
        far (VmHWM).
    """
    status = Path("/proc/self/status").read_text()
    status_fields = {"private": "RssAnon", "file_backed": "RssFile", "peak": "VmHWM"}
    return {
        name: int(status.split(f"{status_field}:")[1].split()[0]) * KIBIBYTE / MEGABYTE
        for name, status_field in status_fields.items()
    }
