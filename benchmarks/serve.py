"""Translation over HTTP by many clients: `python -m vanilla_transformer.benchmarks.serve RUN`.

The server is the command `vanilla-transformer serve` in a process of its own. Clients send the
sentences of the run's corpus over keep-alive connections, one sentence in a request. A single
client sends one request after another, so the server can translate only one sentence at a time.
Many clients send requests at the same time.
"""

import argparse
import contextlib
import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
import psutil

from ..console import run_command
from ..loading import load
from ..paper.study import Section, show_study
from ..train.run_folder.files import read_recipe
from .timing import MEGABYTE
from .work import run_parser, texts_of_run

JSON_HEADERS = {"Content-Type": "application/json"}


class Round(NamedTuple):
    """Measurements of a round, in which the clients send each sentence once.

    Attributes:
        seconds: Wall time of the round, in seconds.
        latencies: Time of each request, in seconds.
        memory: Resident memory of the server after the round, in MB.
    """

    seconds: float
    latencies: list[float]
    memory: float


class Server:
    """Process of the command `vanilla-transformer serve`.

    Args:
        run: Run folder.

    Raises:
        ValueError: If the server does not start.
    """

    def __init__(self, run: str):
        command = [sys.executable, "-m", "vanilla_transformer.cli", "serve", run, "--port", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        startup_lines = []
        for line in self.process.stderr:
            startup_lines.append(line)
            address_match = re.search(r"serving at (http://\S+)", line)
            if address_match:
                self.address = urlsplit(address_match[1]).netloc
                return
        raise ValueError(f"the server must start, got: {' '.join(startup_lines)}")

    def memory(self) -> float:
        """Return the resident memory, in MB."""
        return psutil.Process(self.process.pid).memory_info().rss / MEGABYTE

    def close(self):
        """End the server as a user does, and check that it ends without an error."""
        self.process.terminate()
        if self.process.wait():
            raise ValueError(f"the server must end with exit 0, got {self.process.returncode}.")


class Client:
    """Client with a connection of its own.

    Args:
        address: Host and port of the server.
        languages: Source and target language.
    """

    def __init__(self, address: str, languages: tuple[str, str]):
        self.connection = http.client.HTTPConnection(address)
        self.languages = dict(zip(("source", "target"), languages, strict=True))

    def __call__(self, texts: Sequence[str]) -> tuple[list[str], list[float]]:
        """Translate texts one after another, with one request for each text.

        Args:
            texts: Texts.

        Returns:
            Translations, and the time of each request in seconds.

        Raises:
            ValueError: If a request is refused.
        """
        translations, latencies = [], []
        for text in texts:
            start = time.perf_counter()
            body = json.dumps({"q": text, **self.languages})
            self.connection.request("POST", "/translate", body, JSON_HEADERS)
            response = self.connection.getresponse()
            response_fields = json.loads(response.read())
            latencies.append(time.perf_counter() - start)
            if response.status != http.client.OK:
                raise ValueError(f"the server must translate, got {response_fields}.")
            translations.append(response_fields["translatedText"])
        return translations, latencies


def sections(flags: argparse.Namespace) -> Iterator[Section]:
    """Time the same sentences from one client and from many clients.

    Args:
        flags: Flags of the command line.

    Yields:
        Two sections.
    """
    recipe = read_recipe(Path(flags.run))
    languages = recipe.source_lang, recipe.target_lang
    texts, _ = texts_of_run(Path(flags.run), flags.split, flags.num_sentences)
    pipeline_results = load(flags.run)(texts, split_sentences=recipe.source_lang)
    expected = [result["translation_text"] for result in pipeline_results]
    with contextlib.closing(Server(flags.run)) as server:
        single_client_round = _measure_round(server, languages, texts, expected, 1)
        many_clients_rounds = [
            _measure_round(server, languages, texts, expected, flags.clients)
            for _ in range(flags.rounds)
        ]
    rows = [
        _latency_row(f"{flags.clients:,} clients at a time", many_clients_rounds),
        _latency_row("one client", [single_client_round]),
    ]
    ratio = rows[0][2] / rows[1][2]
    yield Section(
        name="serve",
        title="Requests to the server",
        finding=f"{len(texts):,} sentences of the run's {flags.split} split, one in a request; one "
        f"client in 1 round, {flags.clients:,} clients in {flags.rounds}. Clients and server share "
        f"the cores. All answers are the translations of the pipeline. {flags.clients:,} clients "
        f"get {ratio:.3g} times as many answers per second as one.",
        columns=("clients", "requests", "requests/s", "median ms", "99th percentile ms"),
        rows=rows,
        numbers={
            "seconds": {
                "one": single_client_round.seconds,
                "many": [measured_round.seconds for measured_round in many_clients_rounds],
            }
        },
    )
    yield Section(
        name="memory",
        title="Memory of the server",
        finding="Resident memory of the server's process after each round.",
        columns=("after", "MB"),
        rows=[
            ("one client", single_client_round.memory),
            *(
                (f"round {number}", measured_round.memory)
                for number, measured_round in enumerate(many_clients_rounds, 1)
            ),
        ],
    )


def _measure_round(
    server: Server,
    languages: tuple[str, str],
    texts: list[str],
    expected: list[str],
    num_clients: int,
) -> Round:
    """Send all texts, divided among clients; refuse answers that differ from the pipeline's."""
    clients = [Client(server.address, languages) for _ in range(num_clients)]
    texts_by_client = [texts[client_index::num_clients] for client_index in range(num_clients)]
    with ThreadPoolExecutor(num_clients) as pool:
        start = time.perf_counter()
        answers = list(
            pool.map(lambda client, client_texts: client(client_texts), clients, texts_by_client)
        )
        seconds = time.perf_counter() - start
    for client in clients:
        client.connection.close()
    latencies = []
    for client_index, (translations, client_latencies) in enumerate(answers):
        latencies += client_latencies
        if translations != expected[client_index::num_clients]:
            raise ValueError("answers must be the translations of the pipeline, got others.")
    return Round(seconds, latencies, server.memory())


def _latency_row(name: str, rounds: Sequence[Round]) -> tuple[str, int, float, float, float]:
    latencies = [latency for measured_round in rounds for latency in measured_round.latencies]
    median, percentile_99 = (
        1e3 * float(np.percentile(latencies, percentile)) for percentile in (50, 99)
    )
    rate = len(latencies) / sum(measured_round.seconds for measured_round in rounds)
    return name, len(latencies), rate, median, percentile_99


def _measure(argv: list[str]):
    parser = run_parser("serve", "Time translation over HTTP, with one client and with many.")
    for name, default, help_text in (
        ("num_sentences", 1000, "most sentences of a round"),
        ("clients", 200, "clients that send requests at the same time"),
        ("rounds", 5, "repetitions of all sentences by many clients"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{help_text} (default: %(default)s)"
        )
    flags = parser.parse_args(argv)
    for name in ("num_sentences", "clients", "rounds"):
        if getattr(flags, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(flags, name)}.")
    show_study(sections(flags), "Translation over HTTP", flags.output_dir)


# `main` shows an error as one sentence, and returns the exit status
main = partial(run_command, _measure)


if __name__ == "__main__":
    sys.exit(main())
