"""Reading a request's members by type, and the parts of a chat completion request that both translations make. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from routing.openai import Refusal

Object = dict[str, Any]
_ANY = msgspec.json.Decoder()


def refuse(at: str, text: str) -> Refusal:
    """`at` is where in the body: a path such as `input[0].content`."""
    return Refusal("body_invalid", f"`{at}` {text}", param=at)


def untranslatable(at: str, what: str, instead: str) -> Refusal:
    return refuse(at, f"{what}, which this model's endpoint cannot: it speaks chat completions only. {instead}")


def decode(body: bytes) -> Object:
    try:
        fields = _ANY.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refusal("body_invalid", f"The body cannot be translated: {error}. Send a plain JSON object.") from None
    if not isinstance(fields, dict):
        raise Refusal("body_invalid", 'The body must be a JSON object, like {"model": "…"}.')
    return fields


def mapping(value: object, at: str) -> Object:
    if isinstance(value, dict):
        return value
    raise refuse(at, "must be an object.")


def sequence(value: object, at: str) -> list[Any]:
    if isinstance(value, list):
        return value
    raise refuse(at, "must be a list.")


def text(value: object, at: str) -> str:
    if isinstance(value, str):
        return value
    raise refuse(at, "must be a string.")


def objects(value: object, at: str) -> list[tuple[Object, str]]:
    """The objects of a list, each with where it stands."""
    return [(mapping(each, f"{at}[{n}]"), f"{at}[{n}]") for n, each in enumerate(sequence(value, at))]


def present(fields: Object, *names: str) -> Object:
    """Those of `names` that are there and not null."""
    return {name: fields[name] for name in names if fields.get(name) is not None}


# --- what chat completions are made of -------------------------------------------------------------------------------
def text_part(said: str) -> Object:
    return {"type": "text", "text": said}


def image_part(url: str, detail: object = None) -> Object:
    return {"type": "image_url", "image_url": {"url": url} if detail is None else {"url": url, "detail": detail}}


def content(parts: list[Object]) -> str | list[Object]:
    """One text is said as text: chat templates that know nothing else are common."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        said: str = parts[0]["text"]
        return said
    return parts


def function(name: str, parameters: object, described: Object) -> Object:
    """A tool, nested as chat completions want it."""
    schema = {"type": "object", "properties": {}} if parameters is None else parameters
    return {
        "type": "function",
        "function": {"name": name, "parameters": schema, **present(described, "description", "strict")},
    }


def call(call_id: str, name: str, arguments: str) -> Object:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chosen(name: str) -> Object:
    """The tool choice that names one."""
    return {"type": "function", "function": {"name": name}}


def with_system(said: list[str], messages: list[Object]) -> list[Object]:
    """Instructions and the system messages that begin the talk as one: many templates take a single one, and first."""
    at = 0
    while at < len(messages) and messages[at]["role"] == "system":
        said = [*said, messages[at]["content"]]
        at += 1
    whole = "\n\n".join(each for each in said if each)
    return ([{"role": "system", "content": whole}] if whole else []) + messages[at:]


def finish(chat: Object, model: str, *, stream: bool) -> bytes:
    chat["model"] = model
    if stream:
        chat["stream"] = True
        chat["stream_options"] = {"include_usage": True}
    if not chat.get("tools"):
        for name in ("tools", "tool_choice", "parallel_tool_calls"):
            chat.pop(name, None)
    return msgspec.json.encode(chat)
