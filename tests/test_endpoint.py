"""The HTTP endpoint of examples/deepseek_v4: what it refuses, in which words, and that nothing ends it.

test_http.py asks it by OpenAI's own client, with a real model; here a model that counts answers at once.
"""

import contextlib
import http.client
import json
import re
import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("uvicorn")

from examples.deepseek_v4 import common, load, serve
from examples.deepseek_v4.endpoint import Endpoint
from examples.serving import Request

from .counting_model import VOCABULARY, counting, server

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def chat(messages):
    """A template that wants every content to be a text, and fails in its own way for a role."""
    if any(message["role"] == "broken" for message in messages):
        raise ValueError("messages: the chat template cannot take them: 'broken' is undefined")
    return " ".join(message["content"] for message in messages)


@contextlib.contextmanager
def endpoint(serving, ends=()):
    """The endpoint of a server, and what asks it: (path, body) -> (status, JSON or text)."""
    words = common.Words(None, VOCABULARY)
    made = Endpoint(serving, "counting", words, chat, frozenset(ends), np.zeros(0, np.int32))
    failure = []

    def run():
        try:
            with socket.create_server(("127.0.0.1", 0)) as listening:
                ports.append(listening.getsockname()[1])
                made.run(listening)
        except Exception as e:
            failure.append(e)

    ports = []
    thread = threading.Thread(target=run)
    thread.start()
    until = time.monotonic() + 60
    while not ports and time.monotonic() < until:
        time.sleep(0.01)

    def ask(path, body, method="POST"):
        connection = http.client.HTTPConnection("127.0.0.1", ports[0], timeout=60)
        try:
            given = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
            connection.request(method, f"/v1/{path}", given)
            answer = connection.getresponse()
            text = answer.read()
            is_json = answer.getheader("content-type") == "application/json"
            return answer.status, json.loads(text) if is_json else text.decode()
        finally:
            connection.close()

    made.ask, made.failure, made.port = ask, failure, ports[0]
    try:
        yield made
    finally:
        made.close()
        thread.join()


@pytest.fixture(scope="module")
def served():
    with endpoint(server(places=2, room=256, page=16, pages=6), ends={50, 90}) as made:
        yield made


COMPLETION = {"model": "counting", "prompt": "5 6 7", "temperature": 0, "max_tokens": 4}
CHAT = {"model": "counting", "messages": [{"role": "user", "content": "5 6 7"}], "temperature": 0, "max_tokens": 4}


def numbers(text):
    return [int(x) for x in text.split()]


def events(text):
    *found, last = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(event) for event in found]


@pytest.mark.parametrize(
    "body, said",
    [
        ({}, [8, 9, 10, 11]),
        ({"prompt": [5, 6, 7]}, [8, 9, 10, 11]),
        ({"prompt": ["5 6 7"]}, [8, 9, 10, 11]),
        ({"prompt": [[5, 6, 7]]}, [8, 9, 10, 11]),
        ({"max_tokens": None, "n": 1, "stop": None, "logprobs": None, "user": "me", "top_p": 1}, list(range(8, 24))),
        ({"temperature": 1e-30, "seed": -(2**63), "top_p": 0.001, "logit_bias": {}}, [8, 9, 10, 11]),
        ({"temperature": 1, "top_p": 1e-40}, [8, 9, 10, 11]),
        ({"temperature": 1, "top_p": 5e-324}, [8, 9, 10, 11]),
        ({"prompt": "48", "max_tokens": 9}, [49, 50]),
        ({"prompt": "88", "max_tokens": 9}, [89, 90]),
        ({"prompt": "48", "ignore_eos": True}, [49, 50, 51, 52]),
        ({"stop": "10"}, [8, 9]),
        ({"stop": ["9 10", "11"]}, [8]),
        ({"stop": ["none", "9 1 1"]}, [8, 9, 10, 11]),
    ],
    ids=str,
)
def test_completions(served, body, said):
    """Streamed or not, a completion has these tokens, and says why they end."""
    status, answer = served.ask("completions", {**COMPLETION, **body})
    (choice,) = answer["choices"]
    assert status == 200 and numbers(choice["text"]) == said
    wanted = body.get("max_tokens", 4) or 16
    assert choice["finish_reason"] == ("length" if len(said) == wanted else "stop")
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == len(said) or "stop" in body

    options = {"stream": True, "stream_options": {"include_usage": True}}
    status, answer = served.ask("completions", {**COMPLETION, **body, **options})
    *pieces, last = events(answer)
    assert status == 200 and last["usage"] == usage and last["choices"] == []
    assert numbers("".join(piece["choices"][0]["text"] for piece in pieces)) == said
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + [
        choice["finish_reason"]
    ]
    assert {piece["id"] for piece in pieces} == {last["id"]}


@pytest.mark.parametrize(
    "messages, said",
    [
        ([{"role": "user", "content": "5 6 7"}], [8, 9, 10, 11]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "5 6"}, {"type": "text", "text": "7"}]}],
            [8, 9, 10, 11],
        ),
        (
            [
                {"role": "system", "content": "5"},
                {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]},
                {"role": "tool", "content": "6 7", "tool_call_id": "1"},
            ],
            [8, 9, 10, 11],
        ),
        ([{"role": "user", "content": "5", "name": "me"}, {"role": "assistant"}], [6, 7, 8, 9]),
    ],
    ids=str,
)
def test_chats(served, messages, said):
    status, answer = served.ask("chat/completions", {**CHAT, "messages": messages})
    assert status == 200 and numbers(answer["choices"][0]["message"]["content"]) == said
    assert answer["object"] == "chat.completion" and answer["choices"][0]["message"]["role"] == "assistant"
    pieces = events(served.ask("chat/completions", {**CHAT, "messages": messages, "stream": True})[1])
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert [delta.get("role") for delta in deltas] == ["assistant", None, None, None]
    assert numbers("".join(delta["content"] for delta in deltas)) == said


def test_a_chat_gets_what_fits(served):
    """Without max_tokens: as many as pages have room for, which are fewer than the room of a request."""
    status, answer = served.ask(
        "chat/completions", {"model": "counting", "messages": CHAT["messages"], "ignore_eos": True}
    )
    counts = {"prompt_tokens": 3, "completion_tokens": 93, "total_tokens": 96}
    assert status == 200 and answer["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}


LONG = 10**9
REFUSED = [
    (b"", "the body"), (b"[", "the body"), (b"[]", "the body"), (b"7", "the body"), (b"\xff\xfe", "the body"),
    (b"[" * 100_000 + b"]" * 100_000, "the body"),
    (b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, "the body"),
    (b'{"model": "counting", "prompt": "5", "temperature": 1' + b"0" * 400 + b"}", "temperature: got "),
    (b'{"model": "counting", "prompt": "5", "temperature": 1' + b"0" * 5000 + b"}", "temperature: got |the body"),
    (b'{"model": "counting", "prompt": "5", "temperature": NaN}', "temperature: got nan, wanted"),
    (b'{"model": "counting", "prompt": "5", "temperature": Infinity}', "temperature: got inf, wanted"),
    (b'{"model": "counting", "prompt": "5", "temperature": 1e400}', "temperature: got inf, wanted"),
    (b'{"model": "counting", "prompt": "5", "max_tokens": 1' + b"0" * 400 + b"}", "max_tokens: got |the body"),
    (b'{"model": "counting", "prompt": [1' + b"0" * 400 + b"]}", "prompt: got |the body"),
    (b'{"model": "counting", "prompt": "\\ud800"}', "the body|prompt: got"),
    (b'{"model": "counting", "prompt": "5", "max_tokens": 1, "max_tokens": 2}', "the body: max_tokens is there twice"),
    (b'{"model": "counting", "prompt": "5", "metadata": {"a": 1, "a": 2}}', "the body: a is there twice"),
    ({"temperature": -1}, "temperature: got -1, wanted it to be greater than or equal to 0"),
    ({"temperature": 2.1}, "temperature: got 2.1, wanted it to be less than or equal to 2"),
    ({"temperature": "1"}, "temperature: got '1', wanted it to be a valid number"),
    ({"temperature": True}, "temperature: got True, wanted"),
    ({"temperature": [1]}, r"temperature: got \[1\], wanted"),
    ({"top_p": 0}, "top_p: got 0, wanted it to be greater than 0"),
    ({"top_p": 1.01}, "top_p: got 1.01, wanted"),
    ({"seed": 2**63}, "seed: got 9223372036854775808, wanted"), ({"seed": 1.5}, "seed: got 1.5, wanted"),
    ({"max_tokens": 0}, "max_tokens: got 0, wanted it to be greater than or equal to 1"),
    ({"max_tokens": -3}, "max_tokens: got -3, wanted"), ({"max_tokens": 2.5}, "max_tokens: got 2.5, wanted"),
    ({"max_tokens": True}, "max_tokens: got True, wanted"), ({"max_tokens": "4"}, "max_tokens: got '4', wanted"),
    ({"max_tokens": LONG}, "prompt: a request of 1000000003 tokens"),
    ({"stop": ""}, "stop.0: got '', "), ({"stop": ["1"] * 5}, "stop: got "), ({"stop": 7}, "stop: got 7, wanted"),
    ({"stop": [7]}, "stop.0: got 7, wanted"), ({"stop": ["x" * 2000]}, "stop.0: got 'xxx"),
    ({"stream": "yes"}, "stream: got 'yes', wanted"), ({"stream": 1}, "stream: got 1, wanted"),
    ({"stream_options": {"include_usage": "no"}}, "stream_options.include_usage: got 'no', wanted"),
    ({"stream_options": {"other": 1}}, "stream_options.other: got 1, which is not served"),
    ({"stream_options": []}, r"stream_options: got \[\]"),
    ({"n": 2}, "n: got 2, which is not served"), ({"n": True}, "n: got True, which is not served"),
    ({"echo": True}, "echo: got True, which is not served"), ({"best_of": 3}, "best_of: got 3, which is not served"),
    ({"logprobs": 3}, "logprobs: got 3, which is not served"),
    ({"logit_bias": {"3": 1}}, "logit_bias: got {'3': 1}, which is not served"),
    ({"presence_penalty": 0.5}, "presence_penalty: got 0.5, which is not served"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty: got nan, which is not served"),
    ({"min_p": 0.1}, "min_p: got 0.1, which is not served"), ({"": 1}, ": got 1, which is not served"),
    ({"model": None}, "model: got none, wanted it"), ({"model": 3}, "model: got 3, wanted it to be a valid string"),
    ({"prompt": None}, "prompt: got none, wanted it"), ({"prompt": ""}, "prompt: got no tokens, wanted at least one"),
    ({"prompt": []}, "prompt: got no tokens, wanted at least one"), ({"prompt": [[]]}, "prompt: got no tokens"),
    ({"prompt": [""]}, "prompt: got no tokens"), ({"prompt": "   "}, "prompt: got no tokens"),
    ({"prompt": 5}, "prompt: got 5, wanted one text, or one list of tokens"),
    ({"prompt": {"text": "5"}}, "prompt: got {'text': '5'}, wanted one text"),
    ({"prompt": ["5", "6"]}, r"prompt: got \['5', '6'\], wanted one text"),
    ({"prompt": [[5], [6]]}, "prompt: got .*, wanted one text"), ({"prompt": [[[5]]]}, "prompt: got .*, wanted one"),
    ({"prompt": [1.0]}, r"prompt: got \[1.0\], wanted"), ({"prompt": [1, True]}, r"prompt: got \[1, True\], wanted"),
    ({"prompt": [1, None]}, "prompt: got .*, wanted"), ({"prompt": [1, "2"]}, "prompt: got .*, wanted"),
    ({"prompt": [97]}, "prompt: got 97 as token number 0, wanted integers from 0 to 96"),
    ({"prompt": [-1]}, "prompt: got -1 as token number 0, wanted integers from 0 to 96"),
    ({"prompt": [2**32]}, "prompt: got 4294967296 as token number 0"),
    ({"prompt": "97"}, "prompt: got 97 as token number 0"), ({"prompt": "-1"}, "prompt: got -1 as token number 0"),
    ({"prompt": "five"}, "prompt: got 'five', wanted tokens: numbers from 0 to 96"),
    ({"prompt": "1.5"}, "prompt: got '1.5', wanted tokens"), ({"prompt": "4294967297"}, "prompt: got 4294967297"),
    ({"prompt": "1" * 500}, "prompt: got '111"), ({"prompt": list(range(90)) * 5}, "prompt: a request of 454 tokens"),
]  # fmt: skip
REFUSED_CHATS = [
    ({"messages": None}, "messages: got none, wanted it"), ({"messages": []}, r"messages: got \[\], "),
    ({"messages": "5"}, "messages: got '5', wanted it to be a valid (list|array)"),
    ({"messages": {}}, "messages: got {}, w"),
    ({"messages": [5]}, "messages.0: got 5, wanted"), ({"messages": [None]}, "messages.0: got None, wanted"),
    ({"messages": [[]]}, r"messages.0: got \[\], wanted"), ({"messages": [{}]}, "messages.0.role: got none, wanted it"),
    ({"messages": [{"role": "user"}]}, "messages.0.content: got none, wanted it"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content: got none, wanted it"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content: got 7, wanted"),
    ({"messages": [{"role": "user", "content": {"text": "5"}}]}, "messages.0.content: got {'text': '5'}, wanted"),
    ({"messages": [{"role": "user", "content": ["5"]}]}, r"messages.0.content: got \['5'\], wanted a text, or parts"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages.0.content: got .*, wanted a text, or parts"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content: got .*, wanted a text, or"),
    ({"messages": [{"role": 5, "content": "5"}]}, "messages.0.role: got 5, wanted"),
    ({"messages": [{"role": "", "content": "5"}]}, "messages.0.role: got ''"),
    ({"messages": [{"content": "5"}]}, "messages.0.role: got none, wanted it"),
    ({"messages": [{"role": "broken", "content": "5"}]}, "messages: the chat template cannot take them: 'broken' is"),
    ({"messages": [{"role": "user", "content": ""}]}, "prompt: got no tokens, wanted at least one"),
    ({"max_completion_tokens": 0}, "max_completion_tokens: got 0, wanted"),
    ({"tools": [{"type": "function"}]}, "tools: got .*, which is not served"),
    ({"tool_choice": "required"}, "tool_choice: got 'required', wanted"),
    ({"logprobs": True}, "logprobs: got True, which is not served"),
    ({"top_logprobs": 2}, "top_logprobs: got 2, which is not served"),
    ({"response_format": {"type": "json_object"}}, "response_format: got .*, which is not served"),
    ({"prompt": "5"}, "prompt: got '5', which is not served"),
]  # fmt: skip


def assert_refused(served, path, body, message, status=400):
    got, answer = served.ask(path, body)
    assert got == status, answer
    error = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert re.match(message, error["message"]), error["message"]
    assert len(error["message"]) < 300
    assert error["param"] is None or error["param"] in {
        **COMPLETION,
        **CHAT,
        **(body if isinstance(body, dict) else {}),
    }


def test_what_is_refused(served):
    """Each is 400 with what was given and what is wanted; afterwards the server answers as before."""
    for body, message in REFUSED:
        assert_refused(served, "completions", body if isinstance(body, bytes) else {**COMPLETION, **body}, message)
    for body, message in REFUSED_CHATS:
        assert_refused(served, "chat/completions", {**CHAT, **body}, message)
    assert_refused(
        served, "completions", {**COMPLETION, "model": "other"}, "model: got 'other', wanted 'counting'", 404
    )
    assert_refused(served, "embeddings", {}, "Not Found", 404)
    status, answer = served.ask("completions", None, "GET")
    assert status == 405 and answer["error"]["message"] == "Method Not Allowed"
    assert served.ask("models", None, "GET")[1]["data"][0]["id"] == "counting"
    assert numbers(served.ask("completions", COMPLETION)[1]["choices"][0]["text"]) == [8, 9, 10, 11]
    assert served.server.is_idle and not served.open


def test_a_body_has_a_bound(served, monkeypatch):
    monkeypatch.setattr("examples.deepseek_v4.endpoint.LARGEST", 1000)
    assert_refused(served, "completions", b" " * 1001, "the body: got more than 1000 bytes", 413)


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_leaves_is_forgotten(served, stream):
    """While it is served and while it waits: its pages are free soon, and nothing is kept of it."""
    free = len(served.server.pages.free)
    left = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(5)]
    body = json.dumps({**COMPLETION, "prompt": "91", "max_tokens": 90, "stream": stream, "ignore_eos": True}).encode()
    slow = served.server._run
    served.server._run = lambda *x: time.sleep(0.05) or slow(*x)
    try:
        for connection in left:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
        until = time.monotonic() + 60
        while len(served.server.waiting) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        for connection in left:
            connection.close()
        until = time.monotonic() + 3
        while (not served.server.is_idle or served.open) and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        served.server._run = slow
    assert served.server.is_idle and not served.open and len(served.server.pages.free) == free


def test_load_by_http(served, tmp_path, capsys):
    """Seven requests over three connections: a row of the table, and the same numbers in the file."""
    url, file = f"http://127.0.0.1:{served.port}", tmp_path / "rates.json"
    how = {"concurrency": [3], "n_out": 5, "requests": 7, "url": url}
    (row,) = load.main(**how, n_in=6, devices=2, file=str(file))
    assert row["kept_tokens"] == 0
    assert json.loads(file.read_text())["rows"] == [row] and row["requests"] == 7
    assert 0 < row["ttft_ms"] <= row["ttft_p99_ms"] and 0 <= row["tpot_ms"] <= row["tpot_p99_ms"]
    assert row["in_tokens_s"] / row["out_tokens_s"] == pytest.approx(6 / 5, rel=0.01)
    *_, head, line = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["concurrency", "TTFT", "ms"] and line.split()[:2] == ["3", f"{row['ttft_ms']:.1f}"]
    with pytest.raises(ValueError, match=r"got status 400, .*context_length_exceeded"):
        load.main(**how, n_in=300)
    (row,) = load.main(**how, n_in=20, alike=16)
    assert row["kept_tokens"] >= 4 * 16 and row["kept_tokens"] % 16 == 0  # all but those that come first
    with pytest.raises(ValueError, match="--alike: got 7 tokens, wanted at most the 6 of a prompt"):
        load.main(**how, n_in=6, alike=7)


@pytest.mark.parametrize(
    "how, kind, message",
    [
        ({"minutes": -1.0}, ValueError, "minutes: got -1.0, wanted a number from 0 to"),
        ({"minutes": float("nan")}, ValueError, "minutes: got nan, wanted a number from 0 to"),
        ({"temperature": 9.0}, ValueError, "temperature: got 9.0, wanted a number from 0 to 2"),
        ({"file": "missing/rates.json"}, FileNotFoundError, "missing/rates.json"),
        ({"url": "127.0.0.1:8000"}, ValueError, "--url: got '127.0.0.1:8000', wanted one such as http://127.0.0.1"),
        ({"url": "ftp://127.0.0.1"}, ValueError, "--url: got 'ftp://127.0.0.1', wanted one such as http://127.0.0.1"),
    ],
)
def test_load_says_what_is_wrong_before_it_begins(how, kind, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve, "served", lambda *_, **__: pytest.fail("the model was made before"))
    with pytest.raises(kind, match=message):
        load.main(concurrency=[1], n_in=6, n_out=5, **how)


@pytest.mark.parametrize(
    "answer, message",
    [
        (b"hello\r\n", "got BadStatusLine"),
        (b"HTTP/1.0 404 Not Found\r\n\r\nnothing", "/v1/models: got 'nothing', wanted a list of models"),
        (b'HTTP/1.0 200 OK\r\n\r\n{"data": []}', '/v1/models: got \'{"data": .*, wanted a list of models'),
    ],
)
def test_load_of_what_is_no_endpoint(answer, message):
    def answers():
        connection, _ = listening.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=answers)
        thread.start()
        with pytest.raises(ValueError, match=message):
            load.main(concurrency=[1], n_in=6, n_out=5, url=f"http://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()


@pytest.mark.slow
def test_load_has_a_server_for_each_concurrency(monkeypatch, capsys):
    """It has as many places, and the parameters of the first."""
    made, served = [], serve.served

    def counted(checkpoint, **how):
        made.append((how["places"], how["room"], how["params"] is None))
        return served(checkpoint, **how)

    monkeypatch.setattr(serve, "served", counted)
    how = {"n_in": 12, "n_out": 4, "requests": 3, "chunk": 16, "page": 16, "speculate": 0}
    rows = load.main(concurrency=[1, 2], **how)
    assert [row["concurrency"] for row in rows] == [1, 2] and made == [(1, 16, True), (2, 16, False)]
    made.clear()
    load.main(concurrency=[1], **how, places=3)
    assert made == [(3, 16, True)]
    assert capsys.readouterr().out.count("TTFT") == 2


def test_load_in_process(capsys):
    """No more requests are under way than asked for, and each has the times of its own tokens."""
    serving, most = server(places=4), 0
    submit = serving.submit

    def counted(request):
        nonlocal most
        submit(request)
        most = max(most, len(serving.waiting) + sum(place is not None for place in serving.places))

    serving.submit = counted
    row = load.Row(3, 6, 5, requests=8, minutes=0)
    load.in_process(serving, row, lambda: counting(2, 6), 0.0)
    assert most == 3 and [times.said for times in row.ended] == [5] * 8 and row.steps
    assert all(x.began < x.first <= x.last and x.tpot == (x.last - x.first) / 4 for x in row.ended)
    row = load.Row(1, 6, 5, requests=0, minutes=2)
    row.began -= 119.5
    load.in_process(serving, row, lambda: counting(2, 6), 0.0)
    minute, *_ = row.minutes
    assert minute["minute"] == 1 and minute["MiB"] > 50 and minute["step_ms"] > 0 and minute["host_ms"] > 0
    assert not serving.pages.counts.any() and serving.is_idle
    row = load.Row(1, 20, 5, requests=3, minutes=0)
    load.in_process(serving, row, lambda: counting(2, 20), 0.0)
    assert row.numbers(1)["kept_tokens"] == 2 * 16


def test_a_server_that_fails_says_so():
    """Whoever waits gets an answer, and the program ends with what has happened."""
    with endpoint(server(places=1)) as made:
        run, count = made.server._run, 0

        def fails(*call):
            nonlocal count
            count += 1
            time.sleep(0.05)
            if count == 6:
                raise RuntimeError("the device is lost")
            return run(*call)

        made.server._run = fails
        answers = {}

        def ask(number, body):
            answers[number] = made.ask("completions", {**COMPLETION, "max_tokens": 40, **body})

        threads = [
            threading.Thread(target=ask, args=x) for x in enumerate(({"stream": True}, {"stream": True}, {}, {}))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number in range(2):
            status, text = answers[number]
            assert status == 200 and "the server has failed: the device is lost" in text and "[DONE]" not in text
        for number in range(2, 4):
            status, answer = answers[number]
            assert status == 500 and answer["error"]["type"] == "server_error"
        until = time.monotonic() + 60
        while not made.failure and time.monotonic() < until:
            time.sleep(0.01)
    assert str(made.failure[0]) == "the device is lost"


def test_many_at_once(served):
    """Two hundred requests by twenty clients: each gets its own tokens."""
    wrong = []

    def client(number):
        for i in range(10):
            first, n = (7 * number + i) % 40, 1 + (number + i) % 8
            body = {**COMPLETION, "prompt": [first], "max_tokens": n, "temperature": i % 2, "stream": i % 3 == 0}
            status, answer = served.ask("completions", body)
            pieces = events(answer) if i % 3 == 0 else [answer]
            said = numbers("".join(piece["choices"][0]["text"] for piece in pieces))
            if status != 200 or said != counting(first + 1, n).tolist():
                wrong.append((body, answer))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until = time.monotonic() + 10  # a client has its answer before its stream is closed
    while (served.open or not served.server.is_idle) and time.monotonic() < until:
        time.sleep(0.01)
    assert not wrong and served.server.is_idle and not served.open


# ---- bodies that nobody thought of


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(10**400), 10**400), st.floats(), st.text(max_size=20),
    st.lists(st.integers(-5, 200), max_size=5), st.just([[[[]]]]), st.just({}), st.just("5 6"), st.just([{}]),
    st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda x: st.lists(x, max_size=3)
                 | st.dictionaries(st.text(max_size=8), x, max_size=3), max_leaves=8),
)  # fmt: skip
NAMES = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop",
    "stream", "stream_options", "n", "echo", "logprobs", "logit_bias", "user", "tools", "suffix",
)  # fmt: skip


@st.composite
def bodies(draw):
    """A path and a body near to what is served."""
    is_chat = draw(st.booleans())
    body = dict(CHAT if is_chat else COMPLETION)
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(NAMES) | st.text(max_size=5))
        what = draw(st.sampled_from(["put", "put", "drop", "in a message"]))
        if what == "drop":
            body.pop(name, None)
        elif what == "in a message" and is_chat:
            entry = draw(st.sampled_from(["role", "content", "tool_calls", "name"]))
            body["messages"] = [{**CHAT["messages"][0], entry: draw(JUNK)}]
        else:
            body[name] = draw(JUNK)
    text = json.dumps(body, ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.binary(max_size=4)) + text[at + draw(st.integers(0, 3)) :]
    return "chat/completions" if is_chat else "completions", text


def assert_answered(served, path, text):
    status, answer = served.ask(path, text)
    assert status in (200, 400, 404), (status, answer)
    if status != 200:
        assert answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error"
    assert not served.failure


@pytest.mark.fuzz
@settings.get_profile("fuzz")
@given(body=bodies())
def test_any_body(served, body):
    """The answer is 200, or says what is wrong; the server goes on."""
    assert_answered(served, *body)


FOUND = [
    ("completions", b'{"model": "counting", "prompt": "5", "max_tokens": 2, "user": ' + b"9" * 5000 + b"}"),
    ("completions", b'{"model": "counting", "prompt": "5", "metadata": ' + b"[" * 150 + b"]" * 150 + b"}"),
    ("chat/completions", {**CHAT, "messages": [{**CHAT["messages"][0], "tool_calls": [[10**400]]}]}),
    ("chat/completions", {**CHAT, "messages": [{"role": "assistant", "content": [[]]}]}),
]


@pytest.mark.parametrize("path, text", FOUND, ids=range(len(FOUND)))
def test_bodies_that_were_found(served, path, text):
    assert_answered(served, path, text)


# ---- lines of the standard input


def test_lines(capsys):
    """A line that cannot be a request says so with its number, and all others are served."""
    serving = server(places=2)

    def request_of(number, line):
        words = common.Words(None, VOCABULARY)
        return Request(words.encode(line), 3, heard=serve.printer(number, words.stream()))

    lines = ["5 6", "97", "", "x", "1.0", "7", "-1", "4294967297", " ".join(["1"] * 62), "20"]
    answers = dict(serve.answered(serving, iter(lines), request_of))
    assert sorted(answers) == list(range(len(lines)))
    said = {number: answer.said for number, answer in answers.items() if not isinstance(answer, ValueError)}
    assert said == {0: [7, 8, 9], 5: [8, 9, 10], 9: [21, 22, 23]}
    assert capsys.readouterr().out.count("\n") == 9
    for number, message in ((1, "got 97 as token number 0, wanted integers from 0 to 96"), (2, "got no tokens"),
                            (3, "got 'x', wanted tokens"), (4, "got '1.0'"), (6, "got -1 as token"),
                            (7, "got 4294967297 as token"), (8, "a request of 65 tokens")):  # fmt: skip
        assert f"prompt: {message}" in str(answers[number])


def test_lines_are_answered_before_all_are_there():
    """Of a pipe that stays open; what its reading raises ends the program."""
    answered, written = threading.Event(), []

    def lines():
        yield "5"
        assert answered.wait(60)
        yield "6"
        raise OSError("the pipe is broken")

    with pytest.raises(OSError, match="the pipe is broken"):
        for number, request in serve.answered(
            server(), lines(), lambda number, line: Request(np.array([int(line)], np.int32), 2)
        ):
            written.append((number, request.said))
            answered.set()
    assert written[0] == (0, [6, 7])
