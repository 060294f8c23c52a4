"""Turns a chat's messages into the text that a model goes on from, by a template in Jinja, as checkpoints have it.

The templates are rendered by `transformers`, for whose environment they are written. It needs no PyTorch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.serving.request import short

from .checkpoint import read_json

Chat = Callable[[list[dict[str, Any]]], str]
SPECIAL = {"bos_token", "eos_token"}
LONGEST = 200
"""characters of what a template says against messages"""


def template(checkpoint: str | None, file: str | None = None) -> Chat | None:
    """The chat template in `file`; else the checkpoint's, in chat_template.jinja or tokenizer_config.json; or None.

    Its variables are messages, add_generation_prompt, and the special tokens of tokenizer_config.json, such as
    bos_token. What it raises for some messages is a ValueError.

    Raises:
      ValueError: the template is not one of Jinja, or an entry of tokenizer_config.json has another form than there.
    """
    folder, config = Path(checkpoint or "."), dict[str, Any]()
    if checkpoint and (path := folder / "tokenizer_config.json").exists():
        config = read_json(path)
    if file or (checkpoint and (folder / "chat_template.jinja").exists()):
        path = Path(file or folder / "chat_template.jinja")
        try:
            text = path.read_text()
        except UnicodeDecodeError as e:
            raise ValueError(f"{path}: got no text, wanted a chat template: {e}") from None
    else:
        text = config.get("chat_template")
    if isinstance(text, list) and all(isinstance(x, dict) for x in text):  # of several by name
        text = next((x.get("template", x) for x in text if x.get("name") == "default"), None)
    if text is None:
        return None
    if not isinstance(text, str):
        raise ValueError(f"{path}: chat_template: got {short(text)}, wanted a text")
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    named = {name: x for name, x in config.items() if name.endswith("_token")}
    tokens = {name: x.get("content", x) if isinstance(x, dict) else x for name, x in named.items() if x is not None}
    for name in SPECIAL & tokens.keys():
        if not isinstance(tokens[name], str):
            raise ValueError(f"{path}: {name}: got {short(tokens[name])}, wanted a text")
    tokens = dict.fromkeys(SPECIAL, "") | tokens

    def chat(messages: list[dict[str, Any]]) -> str:
        try:
            found, _ = render_jinja_template([messages], chat_template=text, add_generation_prompt=True, **tokens)
        except Exception as e:  # of Jinja, or whatever the template does with what messages have
            said = str(e)  # perhaps with all of a message
            said = said if len(said) <= LONGEST else said[: LONGEST - 1] + "…"
            raise ValueError(f"messages: the chat template cannot take them: {said}") from e
        return found[0]

    try:
        chat([{"role": "user", "content": ""}])
    except ValueError as e:  # it may well want other messages
        if isinstance(e.__cause__, TemplateSyntaxError):
            raise ValueError(f"{file or folder}: got a chat template that is none of Jinja: {e.__cause__}") from None
    return chat
