"""`vllm serve` as a stand-in: `python3 -m standin.engine serve MODEL [flags]`.

Exit status: 0 after SIGTERM or SIGINT, 1 when the engine cannot start or has died, 2 for a wrong command line.
"""

import asyncio
import gc
import os
import signal
import sys
from types import FrameType

from standin.args import EngineArgs, parse_serve, split_command
from standin.cache_client import CacheError
from standin.core import Engine, StartError
from standin.http_api import HttpApi
from standin.http_server import HttpServer
from standin.settings import Settings

LAST_ANSWERS = 2.0  # seconds in which answers that are being written at exit may end
DEATH_DELAY = 2.0  # seconds that the HTTP server outlives its engine core; vLLM looks every 5 s whether it has died


def _leave(signum: int, frame: FrameType | None) -> None:
    """SIGTERM before the engine is up. As process 1 of a container a process without a handler would ignore it."""
    del signum, frame
    sys.exit(0)


async def serve(args: EngineArgs, settings: Settings) -> int:
    """Serves until SIGTERM or SIGINT, then drains. Returns the exit status."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    print(f"INFO stand-in for vLLM {settings.version} starts", flush=True)
    if settings.start_delay and await _until(stop, settings.start_delay):
        return 0
    try:
        engine = Engine(args, settings)
        starting = asyncio.ensure_future(engine.start())
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return 0
        starting.result()
        server = HttpServer(HttpApi(engine).handle, keep_alive_s=args.keep_alive)
        port = await server.start(args.host, args.port)
    except (StartError, CacheError, OSError) as error:
        print(f"ERROR Engine core initialization failed: {error}", file=sys.stderr, flush=True)
        return 1
    print(f"INFO stand-in for vLLM {settings.version} serves {args.served_names} on {args.host}:{port}", flush=True)
    gc.freeze()  # what exists now lives as long as the process
    status = await _watch(engine, stop)
    if status == 0:
        print(f"INFO [shutdown] draining up to {args.shutdown_timeout} s, {engine.scheduler.unfinished} requests", flush=True)
        await engine.drain(args.shutdown_timeout)
    await server.stop(LAST_ANSWERS)
    await engine.stop()
    return status


async def _until(stop: asyncio.Event, seconds: float) -> bool:
    """True if `stop` came within that time."""
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return False
    return True


async def _watch(engine: Engine, stop: asyncio.Event) -> int:
    """Waits for the signal (0) or for the end of the engine core (1)."""
    while not engine.dead:
        if await _until(stop, 0.5):
            return 0
    return 0 if await _until(stop, DEATH_DELAY) else 1


def main(argv: list[str]) -> int:
    """Entry point; returns the exit status."""
    signal.signal(signal.SIGTERM, _leave)
    try:
        settings = Settings.from_environment(os.environ)
    except ValueError as error:
        print(f"ERROR environment: {error}", file=sys.stderr)
        return 2
    arguments = split_command(argv)
    if settings.exit_at_start >= 0:
        print("ERROR exit at start (STANDIN_EXIT_AT_START)", file=sys.stderr)
        return settings.exit_at_start
    args = parse_serve(arguments, dict(os.environ), settings.max_model_len)
    return asyncio.run(serve(args, settings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
