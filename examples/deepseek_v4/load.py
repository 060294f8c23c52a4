"""Measures a server under load: `python -m examples.deepseek_v4.load [CHECKPOINT] --concurrency 1 16 64`.

Requests have random prompts of --input tokens and say --output tokens each, and so many of them are under way at any
time: when one ends, the next begins. They go to a server in this process, with a checkpoint or a random model, or by
HTTP to one that runs elsewhere (--url). Here each concurrency has a server with as many places, unless --places says
how many. The table has a row for each concurrency:

    TTFT    from a request to its first token
    TPOT    from a token to the next: from the first to the last of a request, over the number of tokens after the first
    tokens/s  of prompts (in) and said (out), from the first request to the end of the last one
    kept    tokens of prompts that were not read, since an earlier prompt began with them: with --alike

With --minutes a row lasts that long. Each minute then has a line, too, with this process's memory, the time of a step,
and how long the thread that works computed for it (host_ms): they stay as they are in a server that lasts.
"""

import contextlib
import gc
import http.client
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import jax
import numpy as np

from examples.serving import Request, Server
from examples.serving.request import number

from . import common, serve

CONCURRENCY = (1, 16, 64, 256)
MOST_MINUTES = 1e6


class Timed(NamedTuple):
    """The times of a request that has ended, in seconds of one clock."""

    began: float
    first: float
    last: float
    said: int
    kept: int = 0

    @property
    def ttft(self) -> float:
        return self.first - self.began

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / max(self.said - 1, 1)


class Row:
    """The measurement of one concurrency, while it goes on and then."""

    def __init__(self, concurrency: int, n_in: int, n_out: int, requests: int, minutes: float) -> None:
        self.concurrency, self.n_in, self.n_out, self.requests = concurrency, n_in, n_out, requests
        self.seconds, self.began, self.begun = 60 * minutes, time.perf_counter(), 0
        self.ended = list[Timed]()
        self.steps, self.host = list[float](), list[float]()
        """seconds of each step in this process, and seconds that its thread computed"""
        self.minutes = list[dict[str, Any]]()
        self.lock = threading.Lock()

    def goes_on(self) -> bool:
        """Says whether another request is to begin, and counts it."""
        with self.lock:
            is_next = time.perf_counter() - self.began < self.seconds if self.seconds else self.begun < self.requests
            self.begun += is_next
            return is_next

    def end(self, times: Timed) -> None:
        with self.lock:
            self.ended.append(times)
            self.tell()

    def tell(self) -> None:
        """Shows progress, and notes each minute."""
        passed = time.perf_counter() - self.began
        of = f"{passed / 60:.1f} of {self.seconds / 60:g} minutes" if self.seconds else f"of {self.requests}"
        common.on_terminal(f"concurrency {self.concurrency}: {len(self.ended)} requests {of} ")
        if self.seconds and passed >= 60 * (len(self.minutes) + 1):
            requests = len(self.ended) - sum(minute["requests"] for minute in self.minutes)
            some, host, self.steps, self.host = self.steps, self.host, [], []
            self.minutes.append({"minute": len(self.minutes) + 1, "requests": requests, "MiB": resident()})
            if some:
                of_steps = {
                    "step_ms": median(some),
                    "step_p99_ms": p99(some),
                    "host_ms": median(host),
                    "steps": len(some),
                }
                self.minutes[-1] |= {name: round(x, 3) for name, x in of_steps.items()}
            print(json.dumps(self.minutes[-1]), file=sys.stderr, flush=True)

    def numbers(self, devices: int) -> dict[str, Any]:
        """The row in JSON; rates are of one device."""
        seconds = max(times.last for times in self.ended) - self.began
        ttft, tpot = [x.ttft for x in self.ended], [x.tpot for x in self.ended]
        rates = [n * len(self.ended) / seconds / devices for n in (self.n_in, self.n_out)]
        found = {
            "ttft_ms": median(ttft), "ttft_p99_ms": p99(ttft), "tpot_ms": median(tpot), "tpot_p99_ms": p99(tpot),
            "in_tokens_s": rates[0], "out_tokens_s": rates[1], "kept_tokens": sum(times.kept for times in self.ended),
        }  # fmt: skip
        row = {"concurrency": self.concurrency, "requests": len(self.ended), "seconds": round(seconds, 1)}
        return {**row, **{name: round(x, 2) for name, x in found.items()}, "minutes": self.minutes}


def median(seconds: list[float]) -> float:
    """In ms."""
    return float(np.median(seconds)) * 1e3


def p99(seconds: list[float]) -> float:
    """In ms."""
    return float(np.quantile(seconds, 0.99)) * 1e3


def resident() -> float:
    """MiB of memory that this process holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024, 1)


# ---- who is asked


def in_process(server: Server, row: Row, prompt: Callable[[], np.ndarray], temperature: float) -> None:
    """Keeps so many requests in a server until the row has enough."""
    began = dict[Request, float]()
    heard = dict[Request, list[float]]()

    def begin() -> None:
        if row.goes_on():
            times = list[float]()
            request = Request(prompt(), row.n_out, temperature, lambda token: times.append(time.perf_counter()))
            heard[request], began[request] = times, time.perf_counter()
            server.submit(request)

    for _ in range(row.concurrency):
        begin()
    now, computed = time.perf_counter(), time.thread_time()
    while not server.is_idle:
        ended = server.work()
        before, now, computed_before, computed = now, time.perf_counter(), computed, time.thread_time()
        if not server.was_chunk:
            row.steps.append(now - before)
            row.host.append(computed - computed_before)
        for request in ended:
            times = heard.pop(request)
            row.end(Timed(began.pop(request), times[0], times[-1], len(times), request.shared))
            begin()


def by_http(whom: tuple[str, str], row: Row, prompt: Callable[[], np.ndarray], temperature: float) -> None:
    """Keeps so many connections to an endpoint busy until the row has enough; raises what any of them raised.

    whom: a URL, and the name of its model.
    """
    failed = list[Exception]()

    def client() -> None:
        try:
            while not failed and row.goes_on():
                row.end(asked(*whom, prompt().tolist(), row.n_out, temperature))
        except Exception as e:
            failed.append(e)

    threads = [threading.Thread(target=client, daemon=True) for _ in range(row.concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def asked(url: str, model: str, prompt: list[int], n_out: int, temperature: float) -> Timed:
    """Asks for a completion, as a stream.

    Raises:
      ValueError: the answer is an error, or has another number of tokens.
    """
    how = {"max_tokens": n_out, "temperature": temperature, "ignore_eos": True, "stream": True}
    body = {"model": model, "prompt": prompt, "stream_options": {"include_usage": True}, **how}
    began, times, usage = time.perf_counter(), list[float](), dict[str, Any]()
    with connected(url) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise ValueError(f"{url}: got status {answer.status}, {answer.read(400).decode(errors='replace')}")
        for event in events(answer):
            if "error" in event:
                raise ValueError(f"{url}: got {event['error']}")
            if event["choices"]:
                times.append(time.perf_counter())
            usage = event.get("usage") or usage
    if usage.get("completion_tokens") != n_out or not times:
        raise ValueError(f"{url}: got usage {usage}, wanted {n_out} tokens")
    return Timed(began, times[0], times[-1], n_out, (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


def events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in answer:
        text = line.decode().strip().removeprefix("data: ")
        if text and text != "[DONE]":
            yield json.loads(text)


@contextlib.contextmanager
def connected(url: str) -> Iterator[http.client.HTTPConnection]:
    """A connection.

    Raises:
      ValueError: it is no URL, or what answers does not speak HTTP.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"--url: got {url!r}, wanted one such as http://127.0.0.1:8000")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        with contextlib.closing(kind(parts.netloc, timeout=3600)) as connection:
            yield connection
    except http.client.HTTPException as e:
        raise ValueError(f"{url}: got {e!r}, wanted an answer by HTTP") from None


def model_at(url: str) -> str:
    """The name of the model that a URL serves."""
    with connected(url) as connection:
        connection.request("GET", "/v1/models")
        text = connection.getresponse().read()
    try:
        return json.loads(text)["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        got = text[:80].decode(errors="replace")
        raise ValueError(
            f"{url}/v1/models: got {got!r}, wanted a list of models, as OpenAI's servers have it"
        ) from None


# ---- the program


def main(
    checkpoint: str | None = None,
    concurrency: Sequence[int] = CONCURRENCY,
    n_in: int = 8192,
    n_out: int = 1024,
    requests: int = 0,
    minutes: float = 0.0,
    temperature: float = 0.0,
    seed: int = 0,
    alike: int = 0,
    url: str | None = None,
    vocabulary: int = 64,
    devices: int = 0,
    file: str | None = None,
    **how: Any,
) -> list[dict[str, Any]]:
    """Prints a table, and returns its rows.

    Args:
      alike: tokens with which all prompts begin.
      requests: of each row; 0 is twice the concurrency, and at least 4.
      vocabulary: random tokens are below it, with a URL.
      devices: by which rates are divided; 0 is those of this process, or 1 with a URL.
      how: of `serve.served`.
    """
    number("minutes", minutes, 0, MOST_MINUTES)
    Request(np.zeros(1, np.int32), n_out, temperature)  # raises before the model is read, and so do these
    common.writable(file)
    if alike > n_in:
        raise ValueError(f"--alike: got {alike} tokens, wanted at most the {n_in} of a prompt")
    rows, rng = list[dict[str, Any]](), np.random.default_rng(seed)
    about = {
        "input": n_in,
        "alike": alike,
        "output": n_out,
        "command": " ".join(["python -m examples.deepseek_v4.load", *sys.argv[1:]]),
    }

    def measure(c: int, send: Callable[..., None], whom: Any, vocabulary: int, devices: int) -> None:
        if not rows:
            columns = "TTFT ms", "p99", "TPOT ms", "p99", "in/s", "out/s", "kept"
            print(f"{'concurrency':>11}", *(f"{name:>10}" for name in columns))
        first = np.random.default_rng((seed, 1)).integers(0, vocabulary, alike, dtype=np.int32)

        def prompt() -> np.ndarray:
            return np.concatenate([first, rng.integers(0, vocabulary, n_in - alike, dtype=np.int32)])

        row = Row(c, n_in, n_out, requests or max(2 * c, 4), minutes)
        send(whom, row, prompt, temperature)
        rows.append(row.numbers(devices))
        common.on_terminal(" " * 70 + "\r")
        print(f"{c:11}", *(f"{rows[-1][name]:10.1f}" for name in rows[-1] if "_" in name), flush=True)
        if file:
            Path(file).write_text(json.dumps({**about, "devices": devices, "rows": rows}, indent=1) + "\n")

    def serve_and_measure(c: int, params: Any) -> Any:
        with serve.served(checkpoint, params=params, **how | {"places": how.get("places") or c}) as (
            server,
            _,
            _,
            mesh,
        ):
            server.compile()
            about.update(device=jax.devices()[0].device_kind, jax=jax.__version__)
            measure(c, in_process, server, server.vocabulary, devices or mesh.size)
            return server.parameters

    if url is not None:
        whom = url, model_at(url)
        for c in concurrency:
            measure(c, by_http, whom, vocabulary, devices or 1)
        return rows
    how["room"] = how.get("room") or n_in + n_out
    params = None
    for c in concurrency:
        params = serve_and_measure(c, params)
        gc.collect()  # the caches of this server, before the next one's
    return rows


def arguments() -> dict:
    parser = common.parser(__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--concurrency", type=common.at_least(1), nargs="+", default=CONCURRENCY, help="default: 1 16 64 256")
    add("--input", dest="n_in", type=common.at_least(1), default=8192, help="tokens of a prompt (default: 8192)")
    add("--output", dest="n_out", type=common.at_least(1), default=1024, help="tokens to say (default: 1024)")
    add("--alike", type=common.at_least(0), default=0, help="tokens with which all prompts begin (default: 0)")
    add("--requests", type=common.at_least(0), default=0, help="of a row (default: twice the concurrency, at least 4)")
    add("--minutes", type=float, default=0.0, help="that a row lasts, in place of a number of requests")
    add("--temperature", type=float, default=0.0, help="default: 0")
    add("--seed", type=common.at_least(0), default=0, help="of the prompts (default: 0)")
    add("--url", help="of an endpoint, such as http://127.0.0.1:8000; its model counts then, and no option of a server")
    add(
        "--vocabulary", type=common.at_least(1), default=64, help="random tokens are below it, with --url (default: 64)"
    )
    add("--devices", type=common.at_least(0), default=0, help="that rates are divided by (default: the server's)")
    add("--json", dest="file", help="a file for the same numbers")
    places, room = (0, "the concurrency"), (0, "input and output")
    serve.options(parser, places=places, room=room, chunk=(4096, 4096), speculate=(0, 0))
    return vars(parser.parse_args())


if __name__ == "__main__":
    common.run(main, **arguments())
