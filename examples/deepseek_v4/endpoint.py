"""A server of requests as an HTTP endpoint in OpenAI's form: completions and chats, streamed or not, and models."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as Asked
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from examples.serve import Request, Server, TooLong

KINDS = {"model": str, "max_tokens": int, "temperature": int | float, "stream": bool, "stream_options": dict,
         "user": str}  # fmt: skip
OF_TEXT = KINDS | {"prompt": str | list}
OF_CHAT = KINDS | {"messages": list, "max_completion_tokens": int}
ALONE = {"n": 1, "best_of": 1, "top_p": 1, "echo": False, "presence_penalty": 0, "frequency_penalty": 0}
"""what else may be said, with this value alone"""


class Refused(HTTPException):
    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(status, message)
        self.param, self.code = param, code


class Endpoint:
    """Requests to `server`.

    read, chat: make tokens of a prompt, and of messages or None; texts(): a function from each token to its text.
    """

    def __init__(
        self, server: Server, name: str, read: Callable[[Any], np.ndarray], chat: Any, texts: Callable, end: int
    ) -> None:
        self.server, self.name, self.read, self.chat, self.texts, self.end = server, name, read, chat, texts, end
        self.asked, self.closed = threading.Event(), False
        routes = [Route("/v1/completions", self.completions, methods=["POST"]), Route("/v1/models", self.models)]
        routes.append(Route("/v1/chat/completions", self.chats, methods=["POST"]))
        self.app = Starlette(routes=routes, exception_handlers={HTTPException: refused})

    def run(self, listening: socket.socket) -> None:
        """Works until `close`, or until an exception such as Ctrl-C's. HTTP has a thread of its own."""
        http = uvicorn.Server(uvicorn.Config(self.app, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=http.run, args=([listening],))
        thread.start()
        try:
            while not self.closed:
                self.asked.wait()
                self.asked.clear()
                while self.server.waiting or any(self.server.places):
                    self.server.work()
        finally:
            http.should_exit = True
            thread.join()

    def close(self) -> None:
        self.closed = True
        self.asked.set()

    async def models(self, _: Asked) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "you"}]})

    async def completions(self, http: Asked) -> StreamingResponse:
        asked = self.checked(await http.body(), OF_TEXT)
        return self.answered(asked, "prompt", self.read, asked.get("prompt", ""), asked.get("max_tokens", 16), "text")

    async def chats(self, http: Asked) -> StreamingResponse:
        asked = self.checked(await http.body(), OF_CHAT)
        if self.chat is None:
            raise Refused("chats are not served: the checkpoint has no template for them, see --chat-template")
        wanted = asked.get("max_completion_tokens", asked.get("max_tokens"))
        return self.answered(asked, "messages", self.chat, asked.get("messages", []), wanted, "chat")

    def checked(self, body: bytes, kinds: dict[str, Any]) -> dict[str, Any]:
        try:
            asked = {name: x for name, x in dict(json.loads(body)).items() if x is not None}
        except (ValueError, TypeError):
            raise Refused("the body is not a JSON object") from None
        for name, x in asked.items():
            if not isinstance(x, kinds.get(name, ())) and x != ALONE.get(name, ...):
                raise Refused(f"{name}: got {x!r}, which is not served", name)
        if asked.get("model") != self.name:
            raise Refused(f"model: got {asked.get('model')!r}, wanted {self.name!r}", "model", "model_not_found", 404)
        return asked

    def answered(
        self, asked: dict[str, Any], param: str, read: Callable, given: Any, wanted: int | None, form: str
    ) -> StreamingResponse:
        """The answer to what is given by this name; wanted: tokens, None: as many as there is room for."""
        tokens, loop, streamed = asyncio.Queue(), asyncio.get_running_loop(), asked.get("stream", False)
        try:
            prompt = read(given)
            wanted = max(self.server.room - len(prompt), 1) if wanted is None else wanted
            request = Request(prompt, wanted, asked.get("temperature", 1.0), end=self.end)
            request.heard = lambda token: loop.call_soon_threadsafe(tokens.put_nowait, token)
            self.server.submit(request)
        except TooLong as e:
            raise Refused(str(e), param, "context_length_exceeded") from None
        except ValueError as e:
            raise Refused(str(e), param) from None
        self.asked.set()
        usage = not streamed or asked.get("stream_options", {}).get("include_usage", False)
        kind = "text/event-stream" if streamed else "application/json"
        return StreamingResponse(self.answer(request, tokens, streamed, usage, form), media_type=kind)

    async def answer(
        self, request: Request, tokens: asyncio.Queue, streamed: bool, usage: bool, form: str
    ) -> AsyncIterator[str]:
        """The body. It is cancelled when the client has gone; then the server forgets the request."""
        kind = "text_completion" if form == "text" else "chat.completion" + ".chunk" * streamed
        made = {"id": f"cmpl-{id(request):x}", "object": kind, "created": int(time.time())}
        made, text, whole, count, finish = made | {"model": self.name}, self.texts(), "", 0, None
        try:
            while finish is None:
                token, count = await tokens.get(), count + 1
                whole += (piece := text(token))
                finish = "stop" if token == request.end else "length" if count == request.wanted else None
                choice = {"index": 0, "finish_reason": finish, "logprobs": None}
                if form == "text":
                    choice["text"] = piece if streamed else whole
                else:
                    said = {"role": "assistant", "content": piece if streamed else whole}
                    choice["delta" if streamed else "message"] = said
                if streamed:
                    yield f"data: {json.dumps(made | {'choices': [choice]})}\n\n"
            used = {"prompt_tokens": len(request.prompt), "completion_tokens": count}
            used["total_tokens"] = sum(used.values())
            made |= {"choices": [] if streamed else [choice], "usage": used}
            if usage:
                yield f"data: {json.dumps(made)}\n\n" if streamed else json.dumps(made)
            if streamed:
                yield "data: [DONE]\n\n"
        finally:
            request.gone = True


async def refused(_: Asked, e: HTTPException) -> JSONResponse:
    where = {"param": getattr(e, "param", None), "code": getattr(e, "code", None)}
    return JSONResponse({"error": {"message": e.detail, "type": "invalid_request_error", **where}}, e.status_code)
