"""The command: `vanilla-transformer explain`."""

import argparse
import errno
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ..atomic_files import atomic_folder
from ..console import add_trust_flag, parse_flags, require_empty_folder
from ..paper.trained import explainer_model
from ..train.ending import noticing_requests

logger = logging.getLogger(__name__)

# `make explainer` builds the page into this folder
PAGE = Path(__file__).parent / "web" / "dist"
MODEL_FOLDER = "model"
HOST = "127.0.0.1"
PORT = 7870
# packages that write the graphs
PACKAGES = "onnx onnxscript onnxruntime"
# value of Content-Type for each file extension
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".json": "application/json; charset=utf-8",
    ".wasm": "application/wasm",
    ".svg": "image/svg+xml",
    "": "application/octet-stream",
}


def run(argv: list[str], prog: str = "vanilla-transformer explain"):
    """Run the command.

    Args:
        argv: Command-line arguments.
        prog: Name of the command, for its help.

    Raises:
        ValueError: If the page is not built, a flag is out of range, a package is missing, or the
            page cannot explain the model.
        OSError: If the port is in use.
        Interrupted: If a signal asks the command to end.
    """
    flags = parse_flags(_parser(prog), argv)
    if not 0 < flags.port < 65536:
        raise ValueError(f"port must be from 1 to 65535, got {flags.port}.")
    folder = (
        None if flags.output_dir is None else require_empty_folder(flags.output_dir, "output_dir")
    )
    if not (PAGE / "index.html").is_file():
        raise ValueError(
            "The page is not built. Build it with `make explainer`, which needs Node.js."
        )
    if folder is not None:
        with atomic_folder(folder) as unfinished:
            write_site(flags.model, unfinished, flags.trust_remote_code)
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        logger.info("%.3g MB in %s; any web server can serve this folder", num_bytes / 1e6, folder)
        return
    # open the port before the export, so that a port in use is an error at once
    with (
        # otherwise SIGTERM would end the process without removing the temporary folder
        noticing_requests(),
        tempfile.TemporaryDirectory() as temporary_folder,
        open_server(Path(temporary_folder), flags.port) as server,
    ):
        write_site(flags.model, Path(temporary_folder), flags.trust_remote_code)
        logger.info("http://%s:%d shows the page; Ctrl+C ends it", HOST, server.server_port)
        server.serve_forever()


def write_site(model_name: str, folder: Path, trust_remote_code: bool = False):
    """Write the page and a model as static files.

    Args:
        model_name: Run folder, model folder or Hub name.
        folder: Existing empty folder.
        trust_remote_code: Whether to run Python code that is saved with the model.

    Raises:
        ValueError: If a package is missing, or the page cannot explain the model.
    """
    shutil.copytree(PAGE, folder, dirs_exist_ok=True)
    (folder / MODEL_FOLDER).mkdir()
    write_model(model_name, folder / MODEL_FOLDER, trust_remote_code)


def write_model(model_name: str, folder: Path, trust_remote_code: bool = False):
    """Write the files of a model that the page reads.

    Args:
        model_name: Run folder, model folder or Hub name.
        folder: Existing empty folder.
        trust_remote_code: Whether to run Python code that is saved with the model.

    Raises:
        ValueError: If a package is missing, or the page cannot explain the model.
    """
    try:
        from .files import save_for_page
    except ModuleNotFoundError as error:
        raise ValueError(
            f"this command needs the package {error.name}, which is not installed: pip install "
            f"{PACKAGES}."
        ) from error
    from ..paper.trained import load_trained

    model, tokenizer = load_trained(model_name, trust_remote_code)
    save_for_page(model, tokenizer, folder, model_name)


@contextmanager
def open_server(folder: Path, port: int) -> Iterator[ThreadingHTTPServer]:
    """Open an HTTP server for the files of a folder, for requests from this machine only.

    Args:
        folder: Folder with the page.
        port: Port to listen on; 0 for any free port.

    Yields:
        The server; call `serve_forever` to answer requests.

    Raises:
        OSError: If the port cannot be opened.
    """
    handler = partial(_Handler, directory=str(folder))
    try:
        server = _Server((HOST, port), handler)
    except OSError as error:
        reason = (
            "is already in use"
            if error.errno == errno.EADDRINUSE
            else f"cannot be opened: {error.strerror}"
        )
        raise OSError(f"Port {port} {reason}. Choose another port with --port.") from error
    with server:
        yield server


class _Server(ThreadingHTTPServer):
    """HTTP server that prints no traceback if a browser closes a connection."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        # a browser closes its connections if the visitor reloads or leaves the page
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(SimpleHTTPRequestHandler):
    """HTTP handler for the files of one folder; every operating system gets `CONTENT_TYPES`."""

    extensions_map = CONTENT_TYPES
    # the base class sets no path for a request that is not HTTP, such as one of https://
    path = ""

    def end_headers(self):
        # the name of a built file changes with its content, so browsers may keep the file;
        # browsers must ask again for any other file
        is_built = self.path.startswith("/assets/")
        cache_control = "max-age=31536000, immutable" if is_built else "no-cache"
        self.send_header("Cache-Control", cache_control)
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def list_directory(self, path: Any) -> None:
        self.send_error(404)

    def log_message(self, *args: Any) -> None:
        pass


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="Serve the page that explains a translation, in the browser and offline.",
    )
    parser.add_argument(
        "--model",
        metavar="RUN",
        default=explainer_model(),
        help="run folder, model folder or Hub name (default: %(default)s)",
    )
    parser.add_argument(
        "--port", type=int, default=PORT, help="port on this machine (default: %(default)s)"
    )
    parser.add_argument(
        "--output_dir",
        metavar="FOLDER",
        help="write the page into this new or empty folder, for any web server; serve nothing",
    )
    add_trust_flag(parser)
    return parser
