"""Serves prompts with a whole DeepSeek-V4: `python -m examples.deepseek_v4.serve CHECKPOINT < prompts.txt`.

Every line is a request, in words or, without a tokenizer.json, in numbers of tokens. Requests come and go in the places
of a batch: `Server` of examples/serving reads prompts in chunks, between steps in which every place says a token, and
hands out the pages of the caches. What a request says is printed as it comes. The whole model is one jitted step whose
caches are updated in place; a chunk has a program for each kind of layers (reader.py). With `--port` requests come by
HTTP instead (endpoint.py).
"""

import argparse
import contextlib
import io
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from examples.serving import Request, Server
from examples.serving.request import integer

from . import common
from .drafts import DSpark
from .reader import Reader

PACKED_D = 512  # of an entry in FP8 or FP4
ROUNDS = 4
"""steps of a call: a call of V4-Flash costs the host as long as two steps of one request"""


def main(
    prompts: Iterable[str] | None = None,
    checkpoint: str | None = None,
    wanted: int = 64,
    temperature: float = 0.0,
    beginning: str = "",
    port: int | None = None,
    chat_template: str | None = None,
    **how: Any,
) -> list[Request | ValueError]:
    """Serves lines, or HTTP requests until Ctrl-C.

    Args:
      prompts: lines; by default those of the standard input.
      port: of an HTTP endpoint, which takes the place of lines; 0 is any.
      chat_template: a file for its chats, in Jinja, where the checkpoint has no template or another is wanted.
      how: of `served`.

    Returns: for each of the prompts its request, or why it cannot be one.

    Raises:
      SystemExit: 1, after all lines of the standard input, some of which could not be requests.
    """
    if port is not None:
        integer("port", port, 0, 65535)
    Request(np.zeros(1, np.int32), wanted, temperature)  # raises before the model is read, and so do these
    ends = common.ends(checkpoint)
    asked = None if port is None else listening(port, checkpoint, chat_template)
    with served(checkpoint, beginning, **how) as (server, words, first, mesh):
        server.compile()
        server.keep(first)
        if asked is not None:
            serve_http(server, checkpoint, words, first, ends, *asked)
            return []

        def request_of(number: int, line: str) -> Request:
            prompt = np.concatenate([first, words.encode(line.removesuffix("\n"))])
            return Request(prompt, wanted, temperature, printer(number, words.stream()), ends)

        answers, refused, read, said, began = {}, 0, 0, 0, time.perf_counter()
        for number, answer in answered(server, standard_input() if prompts is None else prompts, request_of):
            if isinstance(answer, Request):
                read, said = read + len(answer.prompt), said + len(answer.said)
            else:
                refused += 1
                print(f"[{number}] {answer}", file=sys.stderr, flush=True)
            if prompts is not None:
                answers[number] = answer
        seconds = time.perf_counter() - began
    print(f"{read} tokens read, {said} said, in {seconds:.2f} s: {(read + said) / seconds:.0f} tokens/s")
    if server.shared:
        print(f"{server.shared} tokens of these prompts were kept from earlier ones")
    if server.drafted:
        accepted, drafted, each = server.accepted, server.drafted, 1 + server.accepted / server.steps
        print(f"{accepted} of {drafted} drafts were right; a place said {each:.2f} tokens a step")
    peak = max((d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in mesh.devices.flat)
    if peak:
        print(f"a device held at most {peak / 2**30:.2f} GiB")
    if refused and prompts is None:
        raise SystemExit(1)
    return [answers[number] for number in sorted(answers)]


@contextlib.contextmanager
def served(
    checkpoint: str | None = None,
    beginning: str = "",
    places: int = 8,
    room: int = 4096,
    chunk: int = 512,
    readers: int = 1,
    page: int = 256,
    pages: int = 0,
    speculate: int | None = None,
    prefixes: int = 64,
    rounds: int | None = None,
    kept: str | None = None,
    packed: bool = False,
    precision: str | None = None,
    random: str = "v4",
    tensor: int = 1,
    expert: int = 1,
    params: Any = None,
) -> Iterator[tuple[Server, common.Words, np.ndarray, Mesh]]:
    """A server of a whole model, in its mesh; its words; the tokens with which all requests begin; and the mesh.

    Args:
      pages: 0 is as many as all places could fill.
      speculate: drafts of a place in a step, at most; None is as many as the model's own layers make, if it has them.
      rounds: steps of a call; None is ROUNDS, or 1 where drafts are looked up.
      kept: the dtype of packed caches, by its name; None keeps what the model computes with.
      precision: of the products by which attention reads prompts, as in `DSV4Attention`; the model computes with
        bfloat16 then.
      params: the parameters of an earlier server with such arguments; None reads the checkpoint.
    """
    model = common.model_of(checkpoint, drafts=speculate != 0, random=random)
    if speculate is None:
        speculate = model.block if isinstance(model, DSpark) else 0
    rounds = rounds or (ROUNDS if isinstance(model, DSpark) or not speculate else 1)
    if kept and (sizes := {layer.d for layer in model.layers}) != {PACKED_D}:
        got, wanted = ", ".join(map(str, sorted(sizes))), f"a model whose entries have {PACKED_D} dimensions"
        raise ValueError(f"--fp8 and --fp4: got head_dim {got}, wanted {wanted}; --random takes a config.json of one")
    words = common.Words(checkpoint, model.vocabulary)
    first, pages = words.encode(beginning, name="beginning"), pages or places * -(-room // page)
    dtype = common.compute_dtype() if precision is None else jnp.bfloat16
    with common.mesh_of(tensor, expert, data=1) as mesh:
        if params is None:
            progress("reading the checkpoint" if checkpoint else "making random parameters")
            params = model.joined(common.parameters_of(model, checkpoint, mesh, dtype, packed))
        model = model.with_precision(precision)
        how: dict[str, Any] = {"speculate": speculate, "readers": readers, "prefixes": prefixes, "rounds": rounds}
        how |= {"progress": progress, "reader": Reader}
        server = Server(model, params, kept or dtype, places, room, chunk, page, pages, **how)
        memory = f"{common.gib(params):.2f} GiB of parameters, {common.gib(server.caches):.2f} GiB of caches"
        a_token, a_place = common.bytes_a_token(server.caches, pages * page)
        print(f"{mesh.size} {jax.default_backend()} devices, {memory}", flush=True)
        print(f"{a_token:.0f} bytes of pages a token, {a_place / 2**20:.2f} MiB of rings a request", flush=True)
        if prefixes:
            each = sum(x.nbytes for x in jax.tree.leaves(server.state.kept)) / prefixes
            print(
                f"{prefixes} beginnings of prompts may be kept: {each / 2**20:.2f} MiB of each, and pages", flush=True
            )
        yield server, words, first, mesh


def standard_input() -> Iterable[str]:
    """The lines of the standard input. A line with a byte that is no character has a surrogate, and is refused."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def answered(
    server: Server, lines: Iterable[str], request_of: Callable[[int, str], Request]
) -> Iterator[tuple[int, Request | ValueError]]:
    """Serves lines as they come. Yields the number of each and its request, when it is done, or why it cannot be one.

    A thread reads lines, ahead of the server by no more than it has places.
    """
    coming: queue.Queue = queue.Queue(len(server.served))

    def read() -> None:
        try:
            for line in lines:
                coming.put(line)
            coming.put(None)
        except Exception as e:
            coming.put(e)

    threading.Thread(target=read, daemon=True).start()
    numbers, number, is_open = dict[Request, int](), 0, True
    while is_open or not server.is_idle:
        while is_open and len(server.waiting) < len(server.served):
            try:
                line = coming.get(block=server.is_idle)
            except queue.Empty:
                break
            if isinstance(line, Exception):
                raise line
            is_open = line is not None
            if is_open:
                try:
                    server.submit(request := request_of(number, line))
                    numbers[request] = number
                except ValueError as e:
                    yield number, e
                number += 1
        for request in server.work():
            if request.error:
                raise request.error  # of the output
            yield numbers.pop(request), request


def printer(number: int, text: common.Text) -> Callable[[int], None]:
    def heard(token: int) -> None:
        if new := text.add(token):
            print(f"[{number}] {new}", flush=True)

    return heard


def listening(port: int, checkpoint: str | None, chat_template: str | None) -> tuple:
    """A socket bound to the port, the chat template or None, and the class of endpoints.

    Raises:
      SystemExit: a package is not installed.
      OSError: the port is taken.
      ValueError: the template is none.
    """
    try:
        from .chat import template
        from .endpoint import Endpoint

        chat = template(checkpoint, chat_template)
    except ModuleNotFoundError as e:
        package = (e.name or "").partition(".")[0]
        raise SystemExit(f"--port: got no package {package}, wanted those of `pip install '.[http]'`") from None
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound, chat, Endpoint


def serve_http(
    server: Server,
    checkpoint: str | None,
    words: common.Words,
    first: np.ndarray,
    ends: frozenset[int],
    bound,
    chat,
    make,
) -> None:
    """Answers HTTP requests until Ctrl-C. A prompt is a text, or a list of tokens; a chat becomes a text."""
    name = Path(checkpoint).resolve().name if checkpoint else "random"
    with bound:
        bound.listen(2048)
        print(f"http://127.0.0.1:{bound.getsockname()[1]}/v1/completions, model {name}; Ctrl-C ends", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            make(server, name, words, chat, ends, first).run(bound)


def arguments() -> dict:
    parser = common.parser(__doc__.split("\n\n")[0])
    wanted = "tokens that a request says, at most (default: 64)"
    parser.add_argument("--wanted", type=common.at_least(1), default=64, help=wanted)
    options(parser)
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default: the likeliest token; at most 2")
    parser.add_argument("--beginning", default="", help="what all requests begin with, read once")
    parser.add_argument("--port", type=int, help="answer HTTP requests here, in OpenAI's form, and read no lines")
    parser.add_argument(
        "--chat-template", help="a file in Jinja, with --port (default: the checkpoint's, if it has one)"
    )
    return vars(parser.parse_args())


def options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Adds the options of a server; defaults: others than these, and how to say them."""
    unsaid = {"speculate": "as many as those make", "rounds": f"{ROUNDS}, or 1 where drafts are looked up"}
    for name, default, least, what in (
        ("places", 8, 1, "requests served at once"),
        ("room", 4096, 2, "tokens of a request, at most"),
        ("chunk", 512, 1, "tokens of a prompt read at once"),
        ("readers", 1, 1, "prompts read at once, at most"),
        ("page", 256, 1, "tokens of a page, a multiple of 128"),
        ("pages", 0, 0, "pages in the pool of each cache; 0: for all places"),
        ("prefixes", 64, 0, "beginnings of prompts that are kept for later ones, at most; 0: none"),
        ("rounds", None, 1, "steps of a call of the host; a prompt that comes waits for one"),
        ("speculate", None, 0, "drafts of a request in a step, at most: the model's own, if it has layers for them"),
    ):
        default, said = defaults.get(name, (default, unsaid[name] if default is None else default))
        text = f"{what} (default: {said})"
        parser.add_argument(f"--{name}", type=common.at_least(least), default=default, help=text)
    group = parser.add_mutually_exclusive_group()
    of_caches = {"fp8": ("float8_e4m3fn", "FP8"), "fp4": ("float4_e2m1fn", "FP8 and, for entries, FP4")}
    for name, (dtype, what) in of_caches.items():
        group.add_argument(
            f"--{name}",
            dest="kept",
            action="store_const",
            const=dtype,
            help=f"caches in {what}; V4.1's index keys in FP4",
        )
    parser.add_argument("--packed", action="store_true", help="a checkpoint's FP4 and FP8 stay so in memory")
    group = parser.add_mutually_exclusive_group()
    of_products = {"": "", "-bf16-rope": ", but RoPE's part of scores in bfloat16"}
    for name, what in of_products.items():
        group.add_argument(
            f"--fp8-products{name}",
            dest="precision",
            action="store_const",
            const="float8_e4m3fn" + name.replace("-", "_"),
            help=f"attention reads prompts by products of e4m3{what}: faster on Hopper, and less exact; steps stay as "
            "they are",
        )


if __name__ == "__main__":
    common.run(main, **arguments())
