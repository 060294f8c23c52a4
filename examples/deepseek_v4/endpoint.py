"""A server of requests as an HTTP endpoint in OpenAI's form: completions and chats, streamed or not, and models.

The thread that calls `run` works. HTTP has a thread of its own, with an event loop in which answers are written and
tokens become text, while the other thread waits for the device. After each call all new tokens go over at once.
"""

import asyncio
import json
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Literal

import numpy as np
import uvicorn
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Http
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from examples.serving import Request, Server, TooLong, checked_tokens
from examples.serving.request import HOTTEST, short

from .chat import Chat
from .checkpoint import once
from .common import Text, Words

LARGEST = 64 << 20
"""bytes of a body"""
CONNECTIONS = 4096
"""at once; others are answered 503"""


# ---- what may be asked


def only(value: Any) -> Any:
    """The type of what is not served, but may be said where it means nothing."""

    def check(x: Any) -> Any:
        if x != value or isinstance(x, bool) != isinstance(value, bool):
            raise ValueError("which is not served")
        return x

    return Annotated[Any, AfterValidator(check)]


def as_list(x: Any) -> Any:
    return [x] if isinstance(x, str) else x


def without_null(x: Any) -> Any:
    return {name: y for name, y in x.items() if y is not None} if isinstance(x, dict) else x


class Form(BaseModel):
    """A JSON object, in which null is as good as nothing."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def of(cls, x: Any) -> Any:
        return without_null(x)


class StreamOptions(Form):
    include_usage: bool = False


class Asked(Form):
    """The fields that requests for completions and for chats have in common."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    temperature: Annotated[float, Field(ge=0, le=HOTTEST)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=4), BeforeValidator(as_list)
    ] = []
    ignore_eos: bool = False
    """as vLLM and SGLang have it: the tokens that end a text do not"""
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None

    n: only(1) = 1
    presence_penalty: only(0) = 0
    frequency_penalty: only(0) = 0
    repetition_penalty: only(1) = 1
    logit_bias: only({}) = {}

    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    service_tier: Any = None


class Completion(Asked):
    prompt: Any
    best_of: only(1) = 1
    echo: only(False) = False
    suffix: only("") = ""
    logprobs: only(False) = False


def joined(content: Any) -> Any:
    """The text of a message's content, which may come in parts: each begins a line."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ValueError('wanted a text, or parts such as {"type": "text", "text": "…"}')
    return "\n".join(part["text"] for part in content)


class Message(Form):
    """A message of a chat. What else it has goes to the template as it is."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1)]
    content: Annotated[str, BeforeValidator(joined)]

    @model_validator(mode="before")
    @classmethod
    def of(cls, x: Any) -> Any:
        x = without_null(x)
        return {"content": "", **x} if isinstance(x, dict) and x.get("role") == "assistant" else x  # it calls tools


class ChatCompletion(Asked):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: only(False) = False
    top_logprobs: only(0) = 0
    response_format: only({"type": "text"}) = {"type": "text"}
    tools: only([]) = []
    tool_choice: Literal["none", "auto"] = "none"
    parallel_tool_calls: Any = None
    store: only(False) = False


class Refused(HTTPException):
    """An answer that says what is wrong with what was asked."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(status, message)
        self.param, self.code = param, code


def refusal(e: ValidationError) -> Refused:
    """Returns the refusal that names the first field that is wrong, and says how."""
    first = e.errors(include_url=False)[0]
    where, message = ".".join(map(str, first["loc"])), first["msg"]
    if not first["loc"]:
        return Refused(f"the body is not a JSON object that can be read: {message}")
    if first["type"] == "missing":
        got = "none, wanted it"
    elif first["type"] == "extra_forbidden":
        got = f"{short(first['input'])}, which is not served"
    else:
        message = message.removeprefix("Value error, ").replace("Input should", "wanted it to")
        got = f"{short(first['input'])}, {message}"
    return Refused(f"{where}: got {got}", str(first["loc"][0]))


# ---- answers


class Stream:
    """The tokens that a request says, on their way to the client as text."""

    def __init__(self, text: Text, stops: list[str]) -> None:
        self.text, self.stops, self.new, self.has_new = text, stops, deque[int | Exception](), asyncio.Event()
        self.held, self.count, self.is_over = "", 0, False
        """text that may be the beginning of a stop; tokens so far; whether the request has said all that it will"""

    def put(self, new: int | Exception) -> None:
        self.new.append(new)
        self.has_new.set()

    async def pieces(self, request: Request) -> AsyncIterator[tuple[str, str | None]]:
        """The text of each token, and with the last one why it is the last. Raises what else has ended the request."""
        finish = None
        while finish is None:
            while not self.new:
                self.has_new.clear()
                await self.has_new.wait()
            token = self.new.popleft()
            if isinstance(token, Exception):
                raise token
            self.count += 1
            finish = "stop" if token in request.end else "length" if self.count == request.wanted else None
            self.is_over = finish is not None
            piece, is_stopped = self.before_stop(self.text.add(token) + (self.text.end() if finish else ""), not finish)
            finish = "stop" if is_stopped else finish
            yield piece, finish

    def before_stop(self, new: str, goes_on: bool) -> tuple[str, bool]:
        """Returns as much of the text as can be said now, and whether a stop comes after it."""
        text, self.held = self.held + new, ""
        if found := [at for stop in self.stops if (at := text.find(stop)) >= 0]:
            return text[: min(found)], True
        most = min(len(text), max(map(len, self.stops)) - 1) if self.stops and goes_on else 0
        begun = next((n for n in range(most, 0, -1) if any(stop.startswith(text[-n:]) for stop in self.stops)), 0)
        self.held = text[len(text) - begun :]
        return text[: len(text) - begun], False


class Endpoint:
    """Requests to `server`.

    Args:
      name: of the model.
      words: from texts to tokens and back.
      chat: from messages to a text, or None.
      ends: the tokens that end a text.
      beginning: tokens with which all requests begin.
    """

    def __init__(
        self, server: Server, name: str, words: Words, chat: Chat | None, ends: frozenset[int], beginning: np.ndarray
    ) -> None:
        self.server, self.name, self.words, self.chat, self.ends = server, name, words, chat, ends
        self.beginning, self.asked, self.closed = beginning, threading.Event(), False
        self.broken: Exception | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.said: list[tuple[Stream, int | Exception]] = []
        """by the thread that works, since it woke the other one"""
        self.open, self.number = set[Stream](), 0
        """of requests that are not done; how many there were"""
        routes = [Route("/v1/completions", self.completions, methods=["POST"]), Route("/v1/models", self.models)]
        routes.append(Route("/v1/chat/completions", self.chats, methods=["POST"]))
        handlers = {HTTPException: refused, ClientDisconnect: unheard, Exception: failed}
        self.app = Starlette(routes=routes, exception_handlers=handlers)

    def run(self, listening: socket.socket) -> None:
        """Works until `close`, or until an exception such as Ctrl-C's."""
        how = {"log_level": "warning", "timeout_graceful_shutdown": 1, "limit_concurrency": CONNECTIONS}
        http = uvicorn.Server(uvicorn.Config(self.app, **how))

        def serve() -> None:
            try:
                http.run([listening])
            finally:
                self.close()  # whatever has ended it

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            while not self.closed:
                self.asked.wait()
                self.asked.clear()
                while not (self.closed or self.server.is_idle):
                    self.server.work()
                    self.hand_over()
        except Exception as e:
            self.broken = e
            self.loop.call_soon_threadsafe(lambda: [stream.put(self.broken) for stream in self.open])
            raise
        finally:
            http.should_exit = True
            thread.join()

    def close(self) -> None:
        self.closed = True
        self.asked.set()

    def hand_over(self) -> None:
        """Wakes the thread of HTTP once for all that was said: that takes some microseconds."""
        said, self.said = self.said, []
        self.loop.call_soon_threadsafe(lambda: [stream.put(new) for stream, new in said])

    # ---- from here on the thread of HTTP

    async def models(self, _: Http) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "you"}]})

    async def completions(self, http: Http) -> Response:
        asked = await self.checked(http, Completion)
        prompt = await self.tokens_of("prompt", self.prompt, asked.prompt)
        return await self.answered(http, asked, "prompt", prompt, asked.max_tokens or 16)

    async def chats(self, http: Http) -> Response:
        asked = await self.checked(http, ChatCompletion)
        if self.chat is None:
            raise Refused("chats are not served: the checkpoint has no template for them, see --chat-template")
        prompt = await self.tokens_of("messages", self.messages, asked.messages)
        wanted = asked.max_completion_tokens or asked.max_tokens or max(self.server.longest - len(prompt), 1)
        return await self.answered(http, asked, "messages", prompt, wanted)

    async def checked(self, http: Http, form: type[Asked]) -> Any:
        """The body as this form."""
        body = bytearray()
        async for piece in http.stream():
            body += piece
            if len(body) > LARGEST:
                raise Refused(f"the body: got more than {LARGEST} bytes", status=413)
        try:
            asked = form.model_validate_json(bytes(body))
            json.loads(body, object_pairs_hook=once)
        except ValidationError as e:
            raise refusal(e) from None
        except ValueError as e:
            raise Refused(f"the body: {e}, wanted it once") from None
        if asked.model != self.name:
            message = f"model: got {short(asked.model)}, wanted {self.name!r}"
            raise Refused(message, "model", "model_not_found", 404)
        return asked

    async def tokens_of(self, param: str, read: Callable[[Any], np.ndarray], given: Any) -> np.ndarray:
        """The prompt by read(given), in another thread, since it may be long."""
        try:
            return np.concatenate([self.beginning, await run_in_threadpool(read, given)])
        except ValueError as e:
            raise Refused(str(e), param) from None

    def prompt(self, given: Any) -> np.ndarray:
        if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
            (given,) = given
        if isinstance(given, str):
            return self.words.encode(given)
        if not isinstance(given, list) or not all(type(token) is int for token in given):
            raise ValueError(f"prompt: got {short(given)}, wanted one text, or one list of tokens")
        return checked_tokens("prompt", given, self.words.vocabulary)

    def messages(self, messages: list[Message]) -> np.ndarray:
        text = self.chat([message.model_dump() for message in messages])
        return self.words.encode(text, special=False)  # the template has them

    async def answered(self, http: Http, asked: Asked, param: str, prompt: np.ndarray, wanted: int) -> Response:
        """The answer to a prompt; wanted: tokens."""
        self.loop, stream = asyncio.get_running_loop(), Stream(self.words.stream(), asked.stop)
        ends = () if asked.ignore_eos else self.ends
        try:
            request = Request(
                prompt,
                wanted,
                asked.temperature,
                heard=lambda token: self.said.append((stream, token)),
                end=ends,
                top_p=asked.top_p,
                seed=asked.seed,
            )
            self.server.submit(request)
        except TooLong as e:
            raise Refused(str(e), param, "context_length_exceeded") from None
        except ValueError as e:
            raise Refused(str(e), param) from None
        self.open.add(stream)
        self.number += 1
        self.asked.set()
        if self.broken:
            stream.put(self.broken)
        answer = Answer(self, request, stream, self.number, "text" if param == "prompt" else "chat")
        if asked.stream:
            return Streamed(answer.events(asked.stream_options.include_usage), answer.done)
        try:
            return await answer.whole(http)
        finally:
            answer.done()


class Answer:
    """A request's answer, in the form of a "text" or of a "chat"."""

    def __init__(self, endpoint: Endpoint, request: Request, stream: Stream, number: int, form: str) -> None:
        self.endpoint, self.request, self.stream, self.form = endpoint, request, stream, form
        self.about = {"id": f"cmpl-{number}", "created": int(time.time()), "model": endpoint.name}

    def done(self) -> None:
        """Ends the request, if it has not come to its end."""
        if not self.stream.is_over:
            self.endpoint.server.forget(self.request)
        self.endpoint.open.discard(self.stream)

    @property
    def usage(self) -> dict[str, Any]:
        read, said = len(self.request.prompt), self.stream.count
        counts = {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}
        return counts | {"prompt_tokens_details": {"cached_tokens": min(self.request.shared, read)}}

    async def whole(self, http: Http) -> Response:
        """One JSON object. The request ends when the client has gone."""

        async def text() -> tuple[str, str | None]:
            found = [piece async for piece in self.stream.pieces(self.request)]
            return "".join(piece for piece, _ in found), found[-1][1]

        async def client_goes() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass

        said, gone = asyncio.ensure_future(text()), asyncio.ensure_future(client_goes())
        try:
            await asyncio.wait([said, gone], return_when=asyncio.FIRST_COMPLETED)
            if not said.done():
                raise ClientDisconnect
            text, finish = said.result()
        finally:
            said.cancel(), gone.cancel()
        if self.form == "text":
            kind, of_form = "text_completion", {"text": text}
        else:
            kind, of_form = "chat.completion", {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, **of_form, "finish_reason": finish, "logprobs": None}
        return JSONResponse({"object": kind, **self.about, "choices": [choice], "usage": self.usage})

    async def events(self, usage: bool) -> AsyncIterator[str]:
        """An event for each token, and one with the usage if it is wanted."""
        about = {"object": "text_completion" if self.form == "text" else "chat.completion.chunk", **self.about}

        def event(what: dict[str, Any]) -> str:
            return f"data: {json.dumps(what)}\n\n"

        try:
            async for piece, finish in self.stream.pieces(self.request):
                role = {"role": "assistant"} if self.stream.count == 1 else {}
                of_form = {"text": piece} if self.form == "text" else {"delta": {**role, "content": piece}}
                choice = {"index": 0, **of_form, "finish_reason": finish, "logprobs": None}
                yield event({**about, "choices": [choice]})
            if usage:
                yield event({**about, "choices": [], "usage": self.usage})
            yield "data: [DONE]\n\n"
        except Exception as e:
            yield event({"error": {"message": f"the server has failed: {e}", "type": "server_error"}})


class Streamed(StreamingResponse):
    """Events. `done` is called in the end, or when the client has gone, also before the first of them."""

    def __init__(self, events: AsyncIterator[str], done: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.done = done

    async def __call__(self, *how: Any) -> None:
        try:
            await super().__call__(*how)
        finally:
            self.done()


async def refused(_: Http, e: HTTPException) -> JSONResponse:
    where = {"param": getattr(e, "param", None), "code": getattr(e, "code", None)}
    return JSONResponse({"error": {"message": e.detail, "type": "invalid_request_error", **where}}, e.status_code)


async def unheard(*_: Any) -> Response:
    return Response(status_code=400)  # to a client that has gone


async def failed(_: Http, e: Exception) -> JSONResponse:
    return JSONResponse({"error": {"message": f"the server has failed: {e}", "type": "server_error"}}, 500)
