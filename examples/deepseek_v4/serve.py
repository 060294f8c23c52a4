"""Serves prompts with a whole DeepSeek-V4: `python -m examples.deepseek_v4.serve CHECKPOINT < prompts.txt`.

Every line is a request, in words or, without a tokenizer.json, in numbers of tokens. Requests come and go in the places
of a batch: `Server` of examples/serve.py reads prompts in chunks, between steps in which every place says a token, and
hands out the pages of the caches. What a request says is printed as it comes. The whole model is one jitted step whose
caches are updated in place. With `--port` requests come by HTTP instead (endpoint.py).
"""

import contextlib
import json
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from examples.serve import Request, Server

from . import common
from .chat import Chat, template


def main(
    prompts: Iterable[str] | None = None,
    checkpoint: str | None = None,
    wanted: int = 64,
    temperature: float = 0.0,
    places: int = 8,
    room: int = 4096,
    chunk: int = 512,
    page: int = 256,
    pages: int = 0,
    speculate: int = 0,
    beginning: str = "",
    kept: str | None = None,
    packed: bool = False,
    products: str | None = None,
    random: str = "v4",
    tensor: int = 1,
    expert: int = 1,
    port: int | None = None,
    chat_template: str | None = None,
) -> list[Request] | None:
    """Returns the requests in the order of their lines; prompts: lines, by default of the standard input.

    kept: the dtype of packed caches, by its name; None keeps what the model computes with.
    products: by which attention reads prompts, as in `DSV4Attention`; the model computes with bfloat16 then.
    port: of an HTTP endpoint, which takes the place of lines; 0 is any.
    chat_template: a file for its chats, in Jinja, where the checkpoint has no template or another is wanted.
    """
    dtype = common.compute_dtype() if products is None else jnp.bfloat16
    encode, decode = common.words(checkpoint)
    with common.mesh_of(tensor, expert, data=1) as mesh:
        model, params = common.opened(checkpoint, mesh, dtype, packed, drafts=speculate > 0, random=random)
        model = model.with_products(products)
        params, first, pages = model.joined(params), encode(beginning), pages or places * -(-room // page)
        server = Server(model, params, kept or dtype, places, room, chunk, page, pages, first, speculate)
        server.compile()
        memory = f"{common.gib(params):.2f} GiB of parameters, {common.gib(server.caches):.2f} GiB of caches"
        a_token, a_place = common.bytes_a_token(server.caches, pages * page)
        print(f"{mesh.size} {jax.default_backend()} devices, {memory}", flush=True)
        print(f"{a_token:.0f} bytes of pages a token, {a_place / 2**20:.2f} MiB of rings a request", flush=True)

        if port is not None:
            chat = template(checkpoint, chat_template)
            return endpoint(server, checkpoint, model.vocabulary, first, encode, decode, chat, port)
        requests, done, began = [], 0, time.perf_counter()
        for line in sys.stdin if prompts is None else prompts:
            prompt, heard = np.concatenate([first, encode(line)]), printer(len(requests), texts(decode))
            requests.append(Request(prompt, wanted, temperature, heard, end_of(checkpoint)))
            server.submit(requests[-1])
        while done < len(requests):
            done += len(server.work())
        seconds = time.perf_counter() - began
    read, said = (sum(map(len, x)) for x in ([r.prompt for r in requests], [r.said for r in requests]))
    print(f"{read} tokens read, {said} said, in {seconds:.2f} s: {(read + said) / seconds:.0f} tokens/s")
    if speculate:
        accepted, drafted, each = server.accepted, server.drafted, 1 + server.accepted / server.steps
        print(f"{accepted} of {drafted} drafts were right; a place said {each:.2f} tokens a step")
    peak = max((d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in mesh.devices.flat)
    if peak:
        print(f"a device held at most {peak / 2**30:.2f} GiB")
    return requests


def endpoint(
    server: Server, checkpoint: str | None, vocabulary: int, first, encode, decode, chat: Chat | None, port: int
) -> None:
    """Answers HTTP requests until Ctrl-C. A prompt is a text, or a list of tokens; a chat becomes a text."""
    from .endpoint import Endpoint

    def read(prompt: str | list, special: bool = True) -> np.ndarray:
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            (prompt,) = prompt
        tokens = encode(prompt, special) if isinstance(prompt, str) else np.asarray(prompt)
        if tokens.ndim != 1 or tokens.dtype.kind != "i" or not ((tokens >= 0) & (tokens < vocabulary)).all():
            raise ValueError(f"wanted one prompt, a text or a list of tokens below {vocabulary}")
        return np.concatenate([first, tokens.astype(np.int32)])

    def of_chat(messages: list) -> np.ndarray:
        return read(chat(messages), special=False)  # the template has them

    name = Path(checkpoint).resolve().name if checkpoint else "random"
    with socket.create_server(("127.0.0.1", port)) as listening:
        print(f"http://127.0.0.1:{listening.getsockname()[1]}/v1/completions, model {name}; Ctrl-C ends", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            made = Endpoint(server, name, read, chat and of_chat, lambda: texts(decode), end_of(checkpoint))
            made.run(listening)


def printer(number: int, text: Callable[[int], str]) -> Callable[[int], None]:
    def heard(token: int) -> None:
        if new := text(token):
            print(f"[{number}] {new}", flush=True)

    return heard


def texts(decode: Callable[[list[int]], str]) -> Callable[[int], str]:
    """A function from each new token to what it adds to the text."""
    tokens, before = [], ""

    def added(token: int) -> str:
        nonlocal before
        tokens.append(token)
        text = decode(tokens)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):  # a token may end inside of a character
            return ""
        new, before = text[len(before) :], text
        return new

    return added


def end_of(checkpoint: str | None) -> int:
    """The token that ends a text; -1, which is none, if the config names none."""
    found = json.loads((Path(checkpoint) / "config.json").read_text()).get("eos_token_id") if checkpoint else None
    return -1 if found is None else found[0] if isinstance(found, list) else found


def arguments() -> dict:
    parser = common.parser(__doc__.split("\n\n")[0])
    for name, default, what in (
        ("wanted", 64, "tokens that a request says, at most"),
        ("temperature", 0.0, "0: the likeliest token"),
        ("places", 8, "requests served at once"),
        ("room", 4096, "tokens of a request, at most"),
        ("chunk", 512, "tokens of a prompt read at once"),
        ("page", 256, "tokens of a page, a multiple of 128"),
        ("pages", 0, "pages in the pool of each cache; 0: for all places"),
        (
            "speculate",
            0,
            "drafts of a request in a step, at most: the model's own, if it has layers for them",
        ),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{what} (default: {default})")
    parser.add_argument("--beginning", default="", help="what all requests begin with; whole pages of it are shared")
    parser.add_argument("--port", type=int, help="answer HTTP requests here, in OpenAI's form, and read no lines")
    parser.add_argument(
        "--chat-template", help="a file in Jinja, with --port (default: the checkpoint's, if it has one)"
    )
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
            dest="products",
            action="store_const",
            const="float8_e4m3fn" + name.replace("-", "_"),
            help=f"attention reads prompts by products of e4m3{what}: faster on Hopper, and less exact; steps stay as "
            "they are",
        )
    return vars(parser.parse_args())


if __name__ == "__main__":
    main(**arguments())
