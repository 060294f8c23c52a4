"""A server of requests as an HTTP endpoint in OpenAI's form: /v1/completions, streamed or not, and /v1/models."""

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

KINDS = {"model": str, "prompt": str | list, "max_tokens": int, "temperature": int | float, "stream": bool,
         "stream_options": dict, "user": str}  # fmt: skip
ALONE = {"n": 1, "best_of": 1, "top_p": 1, "echo": False, "presence_penalty": 0, "frequency_penalty": 0}
"""what else may be said, with this value alone"""


class Refused(HTTPException):
    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(status, message)
        self.param, self.code = param, code


class Endpoint:
    """Requests to `server`. `read` makes tokens of a prompt, and `texts()` a function from each token to its text."""

    def __init__(self, server: Server, name: str, read: Callable[[Any], np.ndarray], texts: Callable, end: int) -> None:
        self.server, self.name, self.read, self.texts, self.end = server, name, read, texts, end
        self.asked, self.closed = threading.Event(), False
        routes = [Route("/v1/completions", self.completions, methods=["POST"]), Route("/v1/models", self.models)]
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
        try:
            asked = {name: x for name, x in dict(await http.json()).items() if x is not None}
        except (ValueError, TypeError):
            raise Refused("the body is not a JSON object") from None
        for name, x in asked.items():
            if not isinstance(x, KINDS.get(name, ())) and x != ALONE.get(name, ...):
                raise Refused(f"{name}: got {x!r}, which is not served", name)
        if asked.get("model") != self.name:
            raise Refused(f"model: got {asked.get('model')!r}, wanted {self.name!r}", "model", "model_not_found", 404)
        tokens, loop, streamed = asyncio.Queue(), asyncio.get_running_loop(), asked.get("stream", False)
        try:
            prompt = self.read(asked.get("prompt", ""))
            request = Request(prompt, asked.get("max_tokens", 16), asked.get("temperature", 1.0), end=self.end)
            request.heard = lambda token: loop.call_soon_threadsafe(tokens.put_nowait, token)
            self.server.submit(request)
        except TooLong as e:
            raise Refused(str(e), "prompt", "context_length_exceeded") from None
        except ValueError as e:
            raise Refused(str(e), "prompt") from None
        self.asked.set()
        usage = not streamed or asked.get("stream_options", {}).get("include_usage", False)
        kind = "text/event-stream" if streamed else "application/json"
        return StreamingResponse(self.answer(request, tokens, streamed, usage), media_type=kind)

    async def answer(self, request: Request, tokens: asyncio.Queue, streamed: bool, usage: bool) -> AsyncIterator[str]:
        """The body. It is cancelled when the client has gone; then the server forgets the request."""
        made = {"id": f"cmpl-{id(request):x}", "object": "text_completion", "created": int(time.time())}
        made, text, whole, count, finish = made | {"model": self.name}, self.texts(), "", 0, None
        try:
            while finish is None:
                token, count = await tokens.get(), count + 1
                whole += (piece := text(token))
                finish = "stop" if token == request.end else "length" if count == request.wanted else None
                choice = {"index": 0, "text": piece if streamed else whole, "finish_reason": finish, "logprobs": None}
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
