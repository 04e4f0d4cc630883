"""Command that runs the server: `vanilla-transformer serve MODEL...`."""

import argparse
import errno
import logging
import os
import signal
import socket

from ..console import add_trust_flag, parse_flags

HOST, PORT = "127.0.0.1", 5000
MAX_CHARACTERS, MAX_WAITING, TIMEOUT = 5000, 500, 60.0
# environment variable for the key: other users of the machine can read flags, but not this variable
KEY_VARIABLE = "VANILLA_TRANSFORMER_API_KEY"
HIGHEST_PORT = 65535

logger = logging.getLogger(__name__)


def run(argv: list[str], prog: str) -> None:
    """Run the server until a signal ends it; waiting requests still get their responses.

    Args:
        argv: Command-line arguments.
        prog: Name of the command, for its help.

    Raises:
        ValueError: If a flag has an invalid value, the port is in use, a model cannot be loaded,
            or its languages are not known.
    """
    flags = parse_flags(build_parser(prog), argv)
    api_key = os.environ.get(KEY_VARIABLE) if flags.api_key is None else flags.api_key
    if api_key == "":
        raise ValueError("api_key must not be empty.")
    for name in ("max_characters", "max_waiting", "timeout"):
        value = getattr(flags, name)
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}.")
    import uvicorn

    from ..train.devices.memory import keep_freed_memory
    from .app import Limits, build_app
    from .models import load_models
    from .translation_queue import TranslationQueue

    # limit oneDNN's cache of kernels: nearly every batch has a new shape, and needs new kernels
    keep_freed_memory()
    with bound_socket(flags.host, flags.port) as listener:
        models = load_models(flags.models, flags.trust_remote_code)
        # hide a message that the pipeline repeats at each call: the reason why a model does not use
        # the inference engine
        logging.getLogger("vanilla_transformer.pipeline_vanilla_transformer").setLevel(
            logging.WARNING
        )
        queue = TranslationQueue()
        limits = Limits(flags.max_characters, flags.max_waiting, flags.timeout, api_key)
        # no access log, because the query of a URL may contain the text of a client
        config = uvicorn.Config(
            build_app(models, queue, limits),
            log_config=None,
            log_level="critical",
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
        )
        server = uvicorn.Server(config)
        # after its end, uvicorn raises the signal again for the handler that was set before, and
        # the default handler would end the command with an error
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signal_number, server.handle_exit)
        listener.listen(config.backlog)
        logger.info("serving at %s", _url(listener))
        try:
            server.run([listener])
        finally:
            queue.close()


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to a free address, but does not listen yet.

    Args:
        host: Host name or IP address of this machine.
        port: Port; 0 for any free one.

    Returns:
        The socket.

    Raises:
        ValueError: If the port is out of range or in use, or the machine has no such address.
    """
    if not 0 <= port <= HIGHEST_PORT:
        raise ValueError(f"port must be from 0 to {HIGHEST_PORT}, got {port}.")
    try:
        family, socket_type, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket_type, protocol)
        try:
            # reuse the address, because connections of an earlier server may occupy it for minutes
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
        return listener
    # Python raises UnicodeError for a name with an empty part, such as 127..0.1
    except UnicodeError as error:
        raise ValueError(f"host must be a host name or an IP address, got {host!r}.") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"Port {port} is already in use. Choose another port with --port."
            ) from error
        raise ValueError(
            f"host and port must be an address of this machine that you may use, got {host} and "
            f"{port}: {error.strerror}."
        ) from error


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def build_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        prog: Name of the command, for its help.

    Returns:
        The parser.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="Serve translations over HTTP, with the API of LibreTranslate.",
    )
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="run folder, model folder or Hub name; SOURCE-TARGET=MODEL gives the languages of a "
        "model that does not name them, or one pair of a multilingual model, as in en-de=runs/demo",
    )
    parser.add_argument("--host", default=HOST, help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=PORT, help="port, or 0 for any free one (default: %(default)s)"
    )
    parser.add_argument(
        "--api_key",
        help=f"key that clients must send; other users of the machine can read the flag, but not "
        f"the variable {KEY_VARIABLE} (default: none)",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max_characters",
        type=int,
        default=MAX_CHARACTERS,
        help="maximum number of characters of a request (default: %(default)s)",
    )
    limits.add_argument(
        "--max_waiting",
        type=int,
        default=MAX_WAITING,
        help="maximum number of waiting requests (default: %(default)s)",
    )
    limits.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        help="maximum time until the response, in seconds (default: %(default)g)",
    )
    add_trust_flag(parser)
    return parser
