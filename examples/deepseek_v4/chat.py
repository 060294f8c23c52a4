"""From the messages of a chat to the text that a model goes on from, by a template in Jinja, as checkpoints have it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Chat = Callable[[list[dict[str, Any]]], str]


def template(checkpoint: str | None, file: str | None = None) -> Chat | None:
    """The chat template in `file`; else the checkpoint's, in chat_template.jinja or tokenizer_config.json; or None.

    Its variables are messages, add_generation_prompt, bos_token and eos_token; `raise_exception(text)` is a ValueError.
    """
    folder, config = Path(checkpoint or "."), dict[str, Any]()
    if checkpoint and (path := folder / "tokenizer_config.json").exists():
        config = json.loads(path.read_text())
    if file or (checkpoint and (folder / "chat_template.jinja").exists()):
        text = Path(file or folder / "chat_template.jinja").read_text()
    else:
        text = config.get("chat_template")
    if isinstance(text, list):  # of several by name
        text = next((x["template"] for x in text if x["name"] == "default"), None)
    if text is None:
        return None
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token")}
    tokens = {name: x["content"] if isinstance(x, dict) else x or "" for name, x in tokens.items()}
    made = environment.from_string(text)

    def chat(messages: list[dict[str, Any]]) -> str:
        try:
            return made.render(messages=messages, add_generation_prompt=True, **tokens)
        except TemplateError as e:
            raise ValueError(f"the chat template: {e}") from None

    return chat
