"""Turns a chat's messages into the text that a model goes on from, by a template in Jinja, as checkpoints have it.

The templates are rendered by `transformers`, for whose environment they are written. It needs no PyTorch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .checkpoint import read_json

Chat = Callable[[list[dict[str, Any]]], str]


def template(checkpoint: str | None, file: str | None = None) -> Chat | None:
    """The chat template in `file`; else the checkpoint's, in chat_template.jinja or tokenizer_config.json; or None.

    Its variables are messages, add_generation_prompt, and the special tokens of tokenizer_config.json, such as
    bos_token. What it raises for some messages is a ValueError.

    Raises:
      ValueError: the template is not one of Jinja.
    """
    folder, config = Path(checkpoint or "."), dict[str, Any]()
    if checkpoint and (path := folder / "tokenizer_config.json").exists():
        config = read_json(path)
    if file or (checkpoint and (folder / "chat_template.jinja").exists()):
        text = Path(file or folder / "chat_template.jinja").read_text()
    else:
        text = config.get("chat_template")
    if isinstance(text, list):  # of several by name
        text = next((x["template"] for x in text if x["name"] == "default"), None)
    if text is None:
        return None
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    named = {name: x for name, x in config.items() if name.endswith("_token")}
    tokens = {name: x["content"] if isinstance(x, dict) else x for name, x in named.items()}
    tokens = dict.fromkeys(("bos_token", "eos_token"), "") | {name: x for name, x in tokens.items() if x is not None}

    def chat(messages: list[dict[str, Any]]) -> str:
        try:
            found, _ = render_jinja_template([messages], chat_template=text, add_generation_prompt=True, **tokens)
        except Exception as e:  # of Jinja, or whatever the template does with what messages have
            raise ValueError(f"messages: the chat template cannot take them: {e}") from e
        return found[0]

    try:
        chat([{"role": "user", "content": ""}])
    except ValueError as e:  # it may well want other messages
        if isinstance(e.__cause__, TemplateSyntaxError):
            raise ValueError(f"{file or folder}: got a chat template that is none of Jinja: {e.__cause__}") from None
    return chat
