"""The HTTP endpoint of examples/deepseek_v4/serve.py, asked by OpenAI's own client. `make test-hf` runs this."""

import json
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("starlette.testclient").httpx

from examples.deepseek_v4 import chat, common, endpoint, serve  # noqa: E402

pytestmark = [pytest.mark.hf, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The endpoint of the small random model, two places for requests of 256 tokens, and a client.

    Its chats say a role as a number, then the content.
    """
    template = tmp_path_factory.mktemp("chat") / "template.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
        "{{ 8 if m.role == 'user' else 9 }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}10{% endif %}"
    )
    made = queue.Queue()

    class Held(endpoint.Endpoint):
        def run(self, listening):
            made.put((self, listening.getsockname()[1]))
            super().run(listening)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoint, "Endpoint", Held)
        sizes = {"places": 2, "room": 256, "chunk": 16, "page": 16, "beginning": "7 " * 17}
        thread = threading.Thread(target=serve.main, kwargs={**sizes, "port": 0, "chat_template": str(template)})
        thread.start()
        held, port = made.get(timeout=300)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            yield held, client
        held.close()
        thread.join()


def asked(client, prompt, **how):
    return client.completions.create(**{"model": "random", "prompt": prompt, "temperature": 0, **how})


@pytest.mark.parametrize(
    "template, messages, want",
    [
        ("{{ '<call>' + (messages[0].x | tojson) + '</call>' }}", [{"x": {"a": "<é>"}}], '<call>{"a": "<é>"}</call>'),
        ("{{ messages | tojson(indent=1) }}", [{"b": 1, "a": None}], '[\n {\n  "b": 1,\n  "a": null\n }\n]'),
        (
            "{% for m in messages %}{% if m.x == 2 %}{% break %}{% endif %}{{ m.x }}{% endfor %}",
            [{"x": 1}, {"x": 2}],
            "1",
        ),
        ("{% generation %}{{ messages[0].x }}{% endgeneration %}!", [{"x": 5}], "5!"),
        ("{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ add_generation_prompt }}", [], "<s></s>True"),
        ("{{ strftime_now('%Y') | length }}", [], "4"),
        ("  {% if true %}\n  a\n  {% endif %}\n", [], "  a\n"),
    ],
)
def test_templates(template, messages, want, tmp_path):
    """As transformers renders them, with the special tokens of tokenizer_config.json."""
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    assert chat.template(str(tmp_path))(messages) == want
    (tmp_path / "chat_template.jinja").write_text("another")
    assert chat.template(str(tmp_path))(messages) == "another"
    (tmp_path / "chat_template.jinja").unlink()
    listed = [{"name": "tools", "template": "x"}, {"name": "default", "template": template}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**tokens, "chat_template": listed}))
    assert chat.template(str(tmp_path))(messages) == want


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ raise_exception('no ' + messages[0].x) }}", "no tools"),
        ("{{ messages[0].x + 5 }}", "can only concatenate str"),
        ("{{ messages[7].x.y }}", "no element 7"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ messages[0].__class__.__mro__ }}", "unsafe|access"),
    ],
)
def test_errors_of_templates(template, message, tmp_path):
    """Whatever a template raises, it is the request's: no error of the server."""
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=f"^messages: the chat template cannot take them: .*(?:{message})"):
        chat.template(str(tmp_path))([{"x": "tools"}])


def test_an_error_of_a_template_is_short(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception(messages[0].content * 1000) }}")
    with pytest.raises(ValueError, match=r"^messages: the chat template cannot take them: xx.*…$") as found:
        chat.template(str(tmp_path))([{"content": "x"}])
    assert len(str(found.value)) < 300


@pytest.mark.parametrize(
    "config, message",
    [
        ({"chat_template": 5}, "chat_template: got 5, wanted a text"),
        ({"chat_template": ["x"]}, r"chat_template: got \['x'\], wanted a text"),
        ({"chat_template": [{"name": "default"}]}, "chat_template: got {'name': 'default'}, wanted a text"),
        ({"chat_template": "x", "bos_token": 5}, "bos_token: got 5, wanted a text"),
        ({"chat_template": "x", "eos_token": {"lstrip": True}}, "eos_token: got {'lstrip': True}, wanted a text"),
    ],
    ids=str,
)
def test_entries_of_another_form(config, message, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, **config}))
    with pytest.raises(ValueError, match=rf"tokenizer_config\.json: {message}"):
        chat.template(str(tmp_path))


def test_what_is_no_template(tmp_path):
    assert chat.template(None) is chat.template(str(tmp_path)) is None
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match="got a chat template that is none of Jinja: "):
        chat.template(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: got no JSON, wanted an object"):
        chat.template(str(tmp_path))


@pytest.fixture(scope="module")
def alone():
    """From a prompt to the likeliest tokens after it, each by the model whole and without caches."""
    with common.mesh_of(1, 1, data=1) as mesh:
        model, params = common.opened(None, mesh, jnp.float32)

        @jax.jit
        def best(tokens):
            return model(params, tokens).argmax(-1)

        def said(prompt, count):
            tokens = np.zeros((1, 96), np.int32)
            start = 17 + len(prompt)
            tokens[0, :start] = [7] * 17 + prompt
            for i in range(start, start + count):
                tokens[0, i] = best(tokens)[0, i - 1]
            return tokens[0, start : start + count].tolist()

        yield said


def test_two_at_once(served, alone):
    """Streamed and together: the tokens of greedy generation alone, and each by itself."""
    _, client = served
    prompts = [[5, 1, 9, 30, 2] * 5, [3, 60, 11]]

    def streamed(prompt):
        chunks = list(asked(client, prompt, max_tokens=20, stream=True, stream_options={"include_usage": True}))
        *chunks, last = chunks
        read = len(prompt) + 17
        assert (last.choices, last.usage.prompt_tokens, last.usage.completion_tokens) == ([], read, 20)
        assert [c.choices[0].finish_reason for c in chunks] == [None] * 19 + ["length"]
        return [int(c.choices[0].text) for c in chunks]

    with ThreadPoolExecutor() as pool:
        said = list(pool.map(streamed, prompts))
    assert said == [alone(prompt, 20) for prompt in prompts]
    whole = asked(client, " ".join(map(str, prompts[1])), max_tokens=20)
    assert [int(x) for x in whole.choices[0].text.split()] == said[1]
    assert (whole.usage.completion_tokens, whole.usage.total_tokens) == (20, 40) and client.models.list().data[0].id


def test_chats(served, alone):
    """The tokens after the template's text, streamed and together."""
    _, client = served
    messages = [{"role": "system", "content": "3 4"}, {"role": "user", "content": "5 1 30"}]
    want = alone([9, 3, 4, 8, 5, 1, 30, 10], 12)
    how = {"model": "random", "messages": messages, "temperature": 0, "max_completion_tokens": 12}
    whole = client.chat.completions.create(**how)
    assert [int(x) for x in whole.choices[0].message.content.split()] == want
    assert (whole.object, whole.choices[0].message.role, whole.usage.prompt_tokens) == (
        "chat.completion",
        "assistant",
        25,
    )
    chunks = list(client.chat.completions.create(**how, stream=True))
    assert [int(c.choices[0].delta.content) for c in chunks] == want
    assert {c.object for c in chunks} == {"chat.completion.chunk"} and chunks[-1].choices[0].finish_reason == "length"
    for wrong, message in (([{"role": "tool", "content": "1"}], "no tools"), ("1", "messages: got '1'")):
        with pytest.raises(openai.BadRequestError, match=message):
            client.chat.completions.create(**{**how, "messages": wrong})
    parts = [{"role": "system", "content": [{"type": "text", "text": x} for x in "34"]}, messages[1]]
    assert client.chat.completions.create(**{**how, "messages": parts}).choices[0].message.content.split() == [
        *map(str, want)
    ]
    long = client.chat.completions.create(model="random", messages=messages)  # to the end of its room
    assert long.usage.total_tokens == 256


def test_errors(served):
    """OpenAI's form, which its client raises as its own exceptions."""
    _, client = served
    for how, message, param, code in (
        (
            {"prompt": [1] * 300},
            "a request of 333 tokens, 16 to be said, for which 32 pages of 16",
            "prompt",
            "context_length_exceeded",
        ),
        ({"prompt": "five"}, "got 'five', wanted tokens: numbers from 0 to 63", "prompt", None),
        ({"prompt": [1, 64]}, "got 64 as token number 1, wanted integers from 0 to 63", "prompt", None),
        ({"prompt": [[1], [2]]}, "wanted one text, or one list of tokens", "prompt", None),
        ({"prompt": "1", "max_tokens": 0}, "max_tokens: got 0, wanted", "max_tokens", None),
        ({"prompt": "1", "n": 2}, "n: got 2, which is not served", "n", None),
    ):
        with pytest.raises(openai.BadRequestError, match=message) as raised:
            asked(client, **how)
        assert (raised.value.type, raised.value.param, raised.value.code) == ("invalid_request_error", param, code)
    with pytest.raises(openai.NotFoundError, match="model: got 'other', wanted 'random'"):
        asked(client, "1", model="other")
    with pytest.raises(openai.NotFoundError, match="Not Found"):
        client.embeddings.create(model="random", input="1")
    assert httpx.post(f"{client.base_url}completions", content="[").json()["error"]["message"].startswith("the body")


def test_who_leaves_frees_pages(served):
    """A client that goes away, while its request is served or waits: its pages are free, and others get on."""
    held, client = served
    server = held.server
    free, steps = len(server.pages.free), server.steps
    streams = [asked(client, [i], max_tokens=200, stream=True) for i in (1, 2)]
    for stream in streams:
        next(iter(stream))
    with pytest.raises(openai.APITimeoutError):
        asked(client.with_options(timeout=0.2), "3", max_tokens=200)  # waits for a place
    assert len(server.pages.free) < free
    for stream in streams:
        stream.close()
    until = time.monotonic() + 60
    while (any(server.places) or server.waiting or len(server.pages.free) < free) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(server.pages.free) == free and not any(server.places) and not server.waiting
    assert server.steps - steps < 390  # of 600
    assert len(asked(client, "5", max_tokens=3).choices[0].text.split()) == 3
