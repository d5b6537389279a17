"""Anthropic's Messages as chat completions: the request, and the answer back. Pure."""

from __future__ import annotations

import msgspec

from routing.openai import Refusal
from routing.translate import chat, fields
from routing.translate.chat import ChatStream
from routing.translate.fields import Object
from routing.translate.messages_stream import MessagesWriter, Shape, tool_input

_REFUSED = {
    "container": ("names a container", "Leave it out, and offer tools of your own."),
    "mcp_servers": ("asks for MCP servers", "Connect to them from your side, and offer their tools in `tools`."),
    "input": ("belongs to another protocol", "Post this body to /v1/responses, or send `messages`."),
}
_OWN = frozenset(_REFUSED) | {
    # said in another way
    "max_tokens",
    "messages",
    "metadata",
    "output_config",
    "output_format",
    "stop_sequences",
    "stream",
    "system",
    "thinking",
    "tool_choice",
    "tools",
    # of no consequence to the answer, and unknown to many endpoints
    "betas",
    "cache_control",
    "context_management",
    "diagnostics",
    "inference_geo",
    "service_tier",
    "speed",
    "stream_options",
    "user_profile_id",
    "workspace_id",
}
"""Everything else means the same to both, or is for the engine to judge, and passes as it is."""
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Messages:
    def __init__(self) -> None:
        self._shape = Shape("", "", shows_thinking=False)

    def request(self, body: bytes, model: str, request_id: str) -> bytes:
        asked = fields.decode(body)
        made = _chat(asked)
        thinking = fields.mapping(asked.get("thinking") or {}, "thinking").get("type", "disabled")
        self._shape = Shape(request_id.removeprefix("req-"), model, shows_thinking=thinking != "disabled")
        return fields.finish(made, model, stream=asked.get("stream") is True)

    def answer(self, body: bytes) -> bytes:
        shape = self._shape
        read = chat.read_answer(body, shape.model)
        content: list[Object] = []
        if read.thought and shape.shows_thinking:
            content.append({"type": "thinking", "thinking": read.thought, "signature": ""})
        if said := read.said + read.refused:
            content.append({"type": "text", "text": said})
        for number, call in enumerate(read.calls):
            block = shape.tool_block(number, call.id, call.name)
            content.append({**block, "input": tool_input(call.arguments)})
        ended = shape.ended(read.end, called=bool(read.calls), refused=bool(read.refused))
        return msgspec.json.encode({**shape.message(read.model), "content": content, **ended})

    def error(self, envelope: bytes, status: int) -> bytes:
        found = fields.decode(envelope).get("error")
        said = found if isinstance(found, dict) else {"message": "The request failed."}
        kind = _ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
        error = {"type": kind, "message": said.get("message"), **fields.present(said, "code", "param")}
        return msgspec.json.encode({"type": "error", "error": error})

    def stream(self) -> ChatStream:
        return ChatStream(MessagesWriter(self._shape), self._shape.model)


# --- the request -----------------------------------------------------------------------------------------------------
def _chat(asked: Object) -> Object:
    for name, (what, instead) in _REFUSED.items():
        if asked.get(name):
            raise fields.untranslatable(name, what, instead)
    bound = asked.get("max_tokens")
    if not isinstance(bound, int) or isinstance(bound, bool) or bound < 1:
        raise fields.refuse("max_tokens", "must be the number of tokens that the answer may have, 1 or more.")
    made = {name: value for name, value in asked.items() if name not in _OWN and value is not None}
    system = asked.get("system")
    said = [] if system is None else [_plain(system, "system")]
    made["messages"] = fields.with_system(said, _messages(asked.get("messages")))
    made["max_tokens"] = bound
    if asked.get("stop_sequences"):
        made["stop"] = fields.sequence(asked["stop_sequences"], "stop_sequences")
    user = fields.mapping(asked.get("metadata") or {}, "metadata").get("user_id")
    if user is not None:
        made["user"] = user
    wanted = fields.mapping(asked.get("output_config") or {}, "output_config")
    if wanted.get("effort") is not None:
        made["reasoning_effort"] = wanted["effort"]
    form, at = wanted.get("format"), "output_config.format"
    if form is None:
        form, at = asked.get("output_format"), "output_format"
    if form is not None:
        made["response_format"] = _format(fields.mapping(form, at), at)
    made["tools"] = [_tool(*each) for each in fields.objects(asked.get("tools") or [], "tools")]
    made.update(_choice(fields.mapping(asked.get("tool_choice") or {"type": "auto"}, "tool_choice")))
    return made


def _messages(given: object) -> list[Object]:
    messages: list[Object] = []
    for message, at in fields.objects(given, "messages"):
        content, where = message.get("content"), f"{at}.content"
        match message.get("role"):
            case "user":
                messages += _user(content, where)
            case "assistant":
                messages.append(_assistant(content, where))
            case "system":
                messages.append({"role": "system", "content": _plain(content, where)})
            case _:
                raise fields.refuse(f"{at}.role", "must be user or assistant.")
    if not messages:
        raise fields.refuse("messages", "must have at least one message.")
    return messages


def _user(given: object, at: str) -> list[Object]:
    """Results of tools stand before what the user says, with the images that they show after all of them."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    results: list[Object] = []
    parts: list[Object] = []
    for block, where in fields.objects(given, at):
        if block.get("type") == "tool_result":
            result, images = _result(block, where)
            results.append(result)
            parts += images
        else:
            parts += _parts(block, where)
    if parts or not results:
        results.append({"role": "user", "content": fields.content(parts)})
    return results


def _result(block: Object, at: str) -> tuple[Object, list[Object]]:
    call_id = fields.text(block.get("tool_use_id"), f"{at}.tool_use_id")
    given, images = block.get("content"), []
    if given is None or isinstance(given, str):
        said = given or ""
    else:
        parts = [part for each in fields.objects(given, f"{at}.content") for part in _parts(*each)]
        images = [part for part in parts if part["type"] != "text"]
        said = "\n".join(part["text"] for part in parts if part["type"] == "text")
        if images and not said:
            said = "The image follows."
    if block.get("is_error"):
        said = f"Error: {said}"
    return {"role": "tool", "tool_call_id": call_id, "content": said}, images


def _assistant(given: object, at: str) -> Object:
    if isinstance(given, str):
        return {"role": "assistant", "content": given}
    texts: list[str] = []
    calls: list[Object] = []
    for block, where in fields.objects(given, at):
        match block.get("type"):
            case "text":
                texts.append(fields.text(block.get("text"), f"{where}.text"))
            case "tool_use":
                call_id = fields.text(block.get("id"), f"{where}.id")
                name = fields.text(block.get("name"), f"{where}.name")
                arguments = fields.mapping(block.get("input"), f"{where}.input")
                calls.append(fields.call(call_id, name, msgspec.json.encode(arguments).decode()))
            case "thinking" | "redacted_thinking":
                pass  # what a model thought before is not told to it again: chat endpoints refuse it
            case kind:
                raise _unknown_block(kind, where)
    message: Object = {"role": "assistant", "content": "\n".join(texts) if texts or not calls else None}
    if calls:
        message["tool_calls"] = calls
    return message


def _parts(block: Object, at: str) -> list[Object]:
    match block.get("type"):
        case "text":
            return [fields.text_part(fields.text(block.get("text"), f"{at}.text"))]
        case "image":
            source = fields.mapping(block.get("source"), f"{at}.source")
            return [fields.image_part(_image_url(source, f"{at}.source"))]
        case "document":
            return _document(block, at)
        case kind:
            raise _unknown_block(kind, at)


def _image_url(source: Object, at: str) -> str:
    match source.get("type"):
        case "base64":
            kind = fields.text(source.get("media_type"), f"{at}.media_type")
            return f"data:{kind};base64,{fields.text(source.get('data'), f'{at}.data')}"
        case "url":
            return fields.text(source.get("url"), f"{at}.url")
    raise fields.untranslatable(f"{at}.type", "names a stored file", "Send the image itself, as base64.")


def _document(block: Object, at: str) -> list[Object]:
    source = fields.mapping(block.get("source"), f"{at}.source")
    title = block.get("title")
    head = [] if title is None else [fields.text_part(fields.text(title, f"{at}.title"))]
    match source.get("type"):
        case "text":
            return [*head, fields.text_part(fields.text(source.get("data"), f"{at}.source.data"))]
        case "content":
            inner, where = source.get("content"), f"{at}.source.content"
            if isinstance(inner, str):
                return [*head, fields.text_part(inner)]
            return head + [part for each in fields.objects(inner, where) for part in _parts(*each)]
    raise fields.untranslatable(f"{at}.source", "is a file", "Send its text, or its pages as images.")


def _unknown_block(kind: object, at: str) -> Refusal:
    what = f"is a {str(kind)[:60]} block"
    return fields.untranslatable(f"{at}.type", what, "Send text, images, tool_use and tool_result.")


def _plain(given: object, at: str) -> str:
    if isinstance(given, str):
        return given
    said: list[str] = []
    for block, where in fields.objects(given, at):
        if block.get("type") != "text":
            raise fields.untranslatable(f"{where}.type", "is no text", "Send it in a message of the user's.")
        said.append(fields.text(block.get("text"), f"{where}.text"))
    return "\n".join(said)


def _format(form: Object, at: str) -> Object:
    if form.get("type") != "json_schema":
        raise fields.refuse(f"{at}.type", "must be json_schema.")
    schema = fields.mapping(form.get("schema"), f"{at}.schema")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _tool(tool: Object, at: str) -> Object:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        what = f"asks for the built-in tool {str(kind)[:60]}"
        raise fields.untranslatable(f"{at}.type", what, "Leave it out, or offer a tool of your own.")
    name = fields.text(tool.get("name"), f"{at}.name")
    return fields.function(name, fields.mapping(tool.get("input_schema"), f"{at}.input_schema"), tool)


def _choice(choice: Object) -> Object:
    made: Object = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") is True else {}
    match choice.get("type"):
        case "auto" | "none" as same:
            return made if same == "auto" else {"tool_choice": "none"}
        case "any":
            return {**made, "tool_choice": "required"}
        case "tool":
            return {**made, "tool_choice": fields.chosen(fields.text(choice.get("name"), "tool_choice.name"))}
    raise fields.refuse("tool_choice.type", "must be auto, any, tool or none.")
