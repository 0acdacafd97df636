"""`lmcache` as a stand-in: `python3 -m standin.cache server [flags]` and `python3 -m standin.cache coordinator [flags]`.

Exit status: 0 after SIGTERM or SIGINT, 1 when a port cannot be had, 2 for a wrong command line.
"""

import asyncio
import signal
import sys
from types import FrameType

from standin.cache_args import CacheServerArgs, CoordinatorArgs, parse_coordinator, parse_server
from standin.cache_http import CacheHttp, version
from standin.cache_server import CacheServer
from standin.coordinator import Coordinator
from standin.http_server import HttpServer


def _leave(signum: int, frame: FrameType | None) -> None:
    """SIGTERM before the event loop runs; process 1 of a container would ignore it without a handler."""
    del signum, frame
    sys.exit(0)


def _stop_event() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def serve_cache(args: CacheServerArgs) -> int:
    """A cache server until SIGTERM; its HTTP port opens when the data port is open."""
    stop = _stop_event()
    server = CacheServer(args)
    http = HttpServer(CacheHttp(server).handle)
    try:
        await server.start()
        port = await http.start(args.http_host, args.http_port)
    except OSError as error:
        print(f"ERROR {error}", file=sys.stderr, flush=True)
        return 1
    print(f"INFO stand-in for LMCache {version()}: data on {args.host}:{args.port}, HTTP on {args.http_host}:{port}", flush=True)
    await stop.wait()
    await server.stop()
    await http.stop(0.5)
    return 0


async def serve_coordinator(args: CoordinatorArgs) -> int:
    """A coordinator until SIGTERM."""
    stop = _stop_event()
    coordinator = Coordinator(args)
    http = HttpServer(coordinator.handle, keep_alive_s=args.keep_alive)
    try:
        port = await http.start(args.host, args.port)
    except OSError as error:
        print(f"ERROR {error}", file=sys.stderr, flush=True)
        return 1
    expiry = asyncio.create_task(coordinator.expire())
    print(f"INFO stand-in for the LMCache {version()} coordinator on {args.host}:{port}", flush=True)
    await stop.wait()
    expiry.cancel()
    await http.stop(0.5)
    return 0


def main(argv: list[str]) -> int:
    """Entry point; returns the exit status."""
    signal.signal(signal.SIGTERM, _leave)
    if argv and argv[0] == "server":
        return asyncio.run(serve_cache(parse_server(argv[1:])))
    if argv and argv[0] == "coordinator":
        return asyncio.run(serve_coordinator(parse_coordinator(argv[1:])))
    print(f"usage: lmcache server|coordinator [flags]; the stand-in has no command {argv[0] if argv else ''!r}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
