"""Contenders side by side: in turn, batch by batch, so that a machine's moods meet all of them.

Absolute times drift by tens of percents on a machine that others use; a ratio of two times that
were taken one after the other does not.
"""

import gc
import time
from collections.abc import Callable, Sequence
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
from ..train.devices.memory import keep_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEGABYTE = 1e6
# what tells a contender to end; a number asks for a piece, None for its memory
END = "end"
# edge of the square matrices whose product says what a device can do
MATRIX = {"cpu": 2048, "cuda": 8192}
# of them one after the other: one alone is over before a processor is at its speed
PRODUCTS = 10
# plots of a picture, beyond which they stand beside each other too
MOST_PLOTS_BELOW_EACH_OTHER = 4
COLUMNS = ("contender", "ratio", "from", "to", "tokens/s", "share of matrix rate", "peak MB")


@dataclass(frozen=True)
class Contender:
    """Something that does pieces of work, in a process of its own.

    A process of its own has the settings of its own library, and its memory is its own.

    Attributes:
        name: As the tables have it.
        build: Makes, in that process, what does a piece when it is called with it.
        arguments: For `build`.
        pieces: The pieces, as many as the others have.
        amounts: How much each piece is, in tokens or whatever all contenders are counted in.
        flops: Useful floating-point operations of each piece, or none.
    """

    name: str
    build: Callable[..., Callable[[Any], Any]]
    arguments: Sequence[Any]
    pieces: Sequence[Any]
    amounts: Sequence[float]
    flops: Sequence[float] = ()


@dataclass
class Result:
    """What was measured of a contender.

    Attributes:
        name: Of the contender.
        seconds: Of each piece in each round, [rounds, pieces].
        rates: Amount a second, [rounds, pieces].
        flop_rates: Useful operations a second, [rounds, pieces]; none where they are not counted.
        peaks: Memory that it had taken at most after each of the pieces that it warmed up with, and
            after all rounds, in bytes: on a processor beyond what the process had after its
            imports, on a GPU what its tensors had.
    """

    name: str
    seconds: np.ndarray
    rates: np.ndarray
    flop_rates: np.ndarray | None
    peaks: Sequence[float]

    @property
    def peak(self) -> float:
        """Memory that it took at most, in bytes."""
        return self.peaks[-1]

    def part(self, pieces: slice) -> "Result":
        """What was measured with some pieces.

        Args:
            pieces: Which.

        Returns:
            Their times; the peak is that of all.
        """
        flop_rates = None if self.flop_rates is None else self.flop_rates[:, pieces]
        times = self.seconds[:, pieces], self.rates[:, pieces]
        return Result(self.name, *times, flop_rates, self.peaks)


def race(
    contenders: Sequence[Contender],
    rounds: int,
    device: torch.device,
    check: Callable[[dict[str, list[Any]]], Any] | None = None,
    checked: Sequence[int] = (0,),
) -> list[Result]:
    """Time contenders in turn, each piece by all of them before the next.

    Args:
        contenders: With as many pieces each.
        rounds: How often all pieces are done.
        device: What they work on.
        check: Called with what each gave for some pieces, by name, before anything is timed; raises
            where that is not what it must be.
        checked: Those pieces, which are also what each warms up with.

    Returns:
        What was measured, in the order given.
    """
    count = len(contenders[0].pieces)
    seconds = np.zeros((len(contenders), rounds, count))
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(contender, device)) for contender in contenders]
        given: dict[str, list[Any]] = {worker.name: [] for worker in workers}
        peaks: list[list[float]] = [[] for _ in workers]
        for worker, its_peaks in zip(workers, peaks, strict=True):
            for piece in checked:
                given[worker.name].append(worker.do(piece)[1])
                its_peaks.append(worker.peak())
        if check is not None:
            check(given)
        for turn in range(rounds):
            for piece in range(count):
                # nobody always comes after the same one
                for place in np.roll(np.arange(len(workers)), turn * count + piece):
                    seconds[place, turn, piece], _ = workers[place].do(piece)
        for worker, its_peaks in zip(workers, peaks, strict=True):
            its_peaks.append(worker.peak())
    return [
        Result(
            contender.name,
            taken,
            np.asarray(contender.amounts) / taken,
            np.asarray(contender.flops) / taken if len(contender.flops) else None,
            its_peaks,
        )
        for contender, taken, its_peaks in zip(contenders, seconds, peaks, strict=True)
    ]


class Worker:
    """The process of a contender.

    Args:
        contender: What it is to do.
        device: What it works on.

    Raises:
        RuntimeError: If the contender failed; what it said is on stderr.
    """

    def __init__(self, contender: Contender, device: torch.device):
        # nothing of this process is in it: threads and memory are as they come
        context = get_context("spawn")
        self.name = contender.name
        self.connection, theirs = context.Pipe()
        given = (theirs, contender, device.type, torch.get_num_threads())
        self.process = context.Process(target=_serve, args=given, daemon=True)

    def __enter__(self) -> "Worker":
        self.process.start()
        return self

    def __exit__(self, *error: Any) -> None:
        # one that is idle ends by itself, and gives back what libraries have asked the system for
        with suppress(OSError):
            self.connection.send(END)
        self.process.join(None if error[0] is None else 0)
        self.process.terminate()
        self.process.join()

    def do(self, piece: int) -> tuple[float, Any]:
        """Do a piece.

        Args:
            piece: Its number.

        Returns:
            The seconds it took, and what came out.
        """
        return self._asked(piece)

    def peak(self) -> float:
        """The memory it took at most, in bytes."""
        return self._asked(None)

    def _asked(self, question: int | None) -> Any:
        try:
            self.connection.send(question)
            while not self.connection.poll(1):
                if not self.process.is_alive():
                    break
            return self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            raise RuntimeError(
                f"{self.name} ended with exit {self.process.exitcode}; it says above why."
            ) from None


def _serve(connection: Connection, contender: Contender, device: str, threads: int):
    torch.set_num_threads(threads)
    gc.collect()
    # what was the most before is no longer of interest
    Path("/proc/self/clear_refs").write_text("5")
    before = memory()
    work = contender.build(*contender.arguments)
    while True:
        question = connection.recv()
        if question == END:
            return
        if question is None:
            most = (memory()["most"] - before["own"] - before["shared"]) * MEGABYTE
            connection.send(torch.cuda.max_memory_allocated() if device == "cuda" else most)
            continue
        piece = contender.pieces[question]
        gc.collect()
        started = time.perf_counter()
        found = work(piece)
        if device == "cuda":
            torch.cuda.synchronize()
        connection.send((time.perf_counter() - started, found))


def matrix_product(device: torch.device, dtype: torch.dtype, pieces: int) -> Contender:
    """A product of large matrices: what the device can do at most, measured beside the others.

    Args:
        device: Where.
        dtype: Of the matrices.
        pieces: As many as the others have.

    Returns:
        A contender; its amounts are operations.
    """
    flops = [2.0 * PRODUCTS * MATRIX[device.type] ** 3] * pieces
    return Contender("matrix product", Product, (device, dtype), range(pieces), flops, flops)


class Product:
    """The product of two large matrices, by the library that is the faster on the device.

    Args:
        device: Where.
        dtype: Of the matrices.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype):
        if device.type == "cpu":
            keep_memory()
        edge = MATRIX[device.type]
        self.matrices = torch.randn(2, edge, edge, device=device).to(dtype)

    def __call__(self, piece: int) -> None:
        """Multiply.

        Args:
            piece: Unused.
        """
        for _ in range(PRODUCTS):
            product(*self.matrices)


def ratios(result: Result, reference: Result) -> tuple[float, float, float]:
    """How many times as fast one is as another.

    Args:
        result: The one.
        reference: The other, of the same race.

    Returns:
        The median over pieces and rounds, and the quartiles.
    """
    each = result.rates / reference.rates
    low, middle, high = np.quantile(each, (0.25, 0.5, 0.75))
    return float(middle), float(low), float(high)


def rows_of(results: Sequence[Result], reference: str, matrix: Result | None) -> list[tuple]:
    """A line of a table for each contender.

    Args:
        results: Of a race.
        reference: Name of the contender that the others are compared with.
        matrix: The matrix product of the same race.

    Returns:
        Rows for `COLUMNS`.
    """
    (base,) = (result for result in results if result.name == reference)
    rows = []
    for result in results:
        share = None
        if matrix is not None and result.flop_rates is not None:
            share = f"{np.median(result.flop_rates) / np.median(matrix.flop_rates):.0%}"
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
    """Everything that was measured, for the JSON file.

    Args:
        results: Of a race.
        matrix: The matrix product of the same race.

    Returns:
        Seconds of each piece and round, and the rate of the matrix product.
    """
    numbers: dict[str, Any] = {
        "seconds": {result.name: result.seconds.tolist() for result in results},
        "peak_bytes": {result.name: result.peak for result in results},
    }
    if matrix is not None:
        numbers["matrix_product_flops_per_second"] = float(np.median(matrix.flop_rates))
    return numbers


def ratio_figure(tables: dict[str, Sequence[tuple]], reference: str) -> "Figure":
    """Bars of the ratios, a plot for each table.

    Args:
        tables: Rows as `rows_of` gives them, by title.
        reference: What the ratio is to.

    Returns:
        The picture.
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
        # a quartile is never beyond the median but by rounding
        spread = np.maximum([middle - low, high - middle], 0)
        plot.barh(names, middle, xerr=spread, color=ours, height=0.6)
        plot.axvline(1, color="black", linewidth=0.8)
        # one scale, or bars of two plots would not compare
        plot.set(title=title, xlabel=f"times as fast as {reference}", xlim=(0, 1.05 * furthest))
    return figure


def memory() -> dict[str, float]:
    """Memory of this process, as Linux has it in /proc.

    Returns:
        MB of its own, of files that it shares with others, and of both at most so far.
    """
    status = Path("/proc/self/status").read_text()
    names = {"own": "RssAnon", "shared": "RssFile", "most": "VmHWM"}
    kilobyte = 1024
    return {
        name: int(status.split(f"{key}:")[1].split()[0]) * kilobyte / MEGABYTE
        for name, key in names.items()
    }
