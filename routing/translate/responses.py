"""OpenAI's Responses as chat completions: the request, and the answer back. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from routing.translate import chat, fields
from routing.translate.chat import ChatStream
from routing.translate.fields import Object
from routing.translate.responses_stream import Item, ResponsesWriter, Shape

ECHO_BYTES = 64 * 1024
"""A field of the request longer than this is not said again in each answer."""
_ECHO: Object = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": None,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
_WHOLE_TALK = "Send the whole conversation in `input`."
_REFUSED = {
    "previous_response_id": ("continues a stored answer", _WHOLE_TALK),
    "conversation": ("names a stored conversation", _WHOLE_TALK),
    "prompt": ("names a stored prompt", "Send its text in `instructions` and `input`."),
    "background": ("asks for an answer to fetch later", "Leave it out; `stream` shows the answer as it comes."),
    "moderation": ("asks for moderation", "Leave it out."),
    "top_logprobs": ("asks for log probabilities", "Ask /v1/chat/completions for them."),
    "messages": ("belongs to another protocol", "Post this body to /v1/chat/completions, or send `input`."),
}
_OWN = frozenset(_REFUSED) | {
    # said in another way
    "input",
    "instructions",
    "max_output_tokens",
    "reasoning",
    "text",
    "tools",
    "tool_choice",
    "stream",
    "n",
    # of no consequence to the answer, and unknown to many endpoints
    "client_metadata",
    "context_management",
    "include",
    "max_tool_calls",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "truncation",
}
"""Everything else means the same to both, or is for the engine to judge, and passes as it is."""


class Responses:
    def __init__(self) -> None:
        self._shape = Shape("", "", {})

    def request(self, body: bytes, model: str, request_id: str) -> bytes:
        asked = fields.decode(body)
        made = _chat(asked)
        self._shape = Shape(request_id.removeprefix("req-"), model, _echo(asked))
        return fields.finish(made, model, stream=asked.get("stream") is True)

    def answer(self, body: bytes) -> bytes:
        read = chat.read_answer(body, self._shape.model)
        items: list[Item] = []

        def add(kind: str, text: str, call_id: str | None = None, name: str = "") -> None:
            item = Item(kind, self._shape.request_id, len(items), call_id, name)
            item.text += text.encode()
            items.append(item)

        if read.thought:
            add("reasoning", read.thought)
        if read.said:
            add("text", read.said)
        if read.refused:
            add("refusal", read.refused)
        for call in read.calls:
            add("call", call.arguments, call.id, call.name)
        self._shape.model, self._shape.created = read.model, read.created
        return msgspec.json.encode(self._shape.ended(items, read.end))

    def error(self, envelope: bytes, status: int) -> bytes:
        return envelope

    def stream(self) -> ChatStream:
        return ChatStream(ResponsesWriter(self._shape), self._shape.model)


def _echo(asked: Object) -> Object:
    said = {**_ECHO, **fields.present(asked, *_ECHO)}
    return {name: value if _short(value) else _ECHO[name] for name, value in said.items()}


def _short(value: object) -> bool:
    return len(msgspec.json.encode(value)) <= ECHO_BYTES


# --- the request -----------------------------------------------------------------------------------------------------
def _chat(asked: Object) -> Object:
    for name, (what, instead) in _REFUSED.items():
        if asked.get(name):
            raise fields.untranslatable(name, what, instead)
    if asked.get("n") not in (None, 1):
        raise fields.untranslatable("n", "asks for several answers", "Send one request for each.")
    for at, wanted in enumerate(fields.sequence(asked.get("include") or [], "include")):
        if wanted == "message.output_text.logprobs":
            raise fields.untranslatable(f"include[{at}]", *_REFUSED["top_logprobs"])
    made = {name: value for name, value in asked.items() if name not in _OWN and value is not None}
    instructions = asked.get("instructions")
    said = [] if instructions is None else [fields.text(instructions, "instructions")]
    made["messages"] = fields.with_system(said, _messages(asked.get("input")))
    if asked.get("max_output_tokens") is not None:
        made["max_tokens"] = asked["max_output_tokens"]
    reasoning = fields.mapping(asked.get("reasoning") or {}, "reasoning")
    if reasoning.get("effort") is not None:
        made["reasoning_effort"] = reasoning["effort"]
    made.update(_format(fields.mapping(asked.get("text") or {}, "text")))
    made["tools"], made["tool_choice"] = _tools(asked)
    if made["tool_choice"] is None:
        del made["tool_choice"]
    return made


def _messages(given: object) -> list[Object]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise fields.refuse("input", "must be a text or a list of at least one item.")
    messages: list[Object] = []
    for item, at in fields.objects(given, "input"):
        match item.get("type", "message"):
            case "message":
                messages.append(_message(item, at))
            case "function_call":
                last = messages[-1] if messages else {}
                if last.get("role") != "assistant":
                    last = {"role": "assistant", "content": None}
                    messages.append(last)
                name = fields.text(item.get("name"), f"{at}.name")
                arguments = fields.text(item.get("arguments"), f"{at}.arguments")
                call_id = fields.text(item.get("call_id"), f"{at}.call_id")
                last.setdefault("tool_calls", []).append(fields.call(call_id, name, arguments))
            case "function_call_output":
                call_id = fields.text(item.get("call_id"), f"{at}.call_id")
                said = _plain(item.get("output"), f"{at}.output")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": said})
            case "reasoning":
                pass  # what a model thought before is not told to it again: chat endpoints refuse it
            case kind:
                what = f"is a {str(kind)[:60]} item"
                instead = "Send messages, function calls and their outputs; stored items are not kept here."
                raise fields.untranslatable(f"{at}.type", what, instead)
    return messages


def _message(item: Object, at: str) -> Object:
    role = item.get("role")
    given, at = item.get("content"), f"{at}.content"
    match role:
        case "user":
            if isinstance(given, str):
                return {"role": role, "content": given}
            return {"role": role, "content": fields.content([_part(*each) for each in fields.objects(given, at)])}
        case "assistant":
            return {"role": role, "content": _plain(given, at)}
        case "system" | "developer":
            return {"role": "system", "content": _plain(given, at)}
    raise fields.refuse(at.removesuffix("content") + "role", "must be user, assistant, system or developer.")


def _plain(given: object, at: str) -> str:
    """Content that can only be text where it stands."""
    if isinstance(given, str):
        return given
    parts = [(_part(*each), each[1]) for each in fields.objects(given, at)]
    for part, where in parts:
        if part["type"] != "text":
            raise fields.untranslatable(where, "is no text", "Send it in a message of the user's.")
    return "\n".join(part["text"] for part, _ in parts)


def _part(part: Object, at: str) -> Object:
    match part.get("type"):
        case "input_text" | "output_text" | "text":
            return fields.text_part(fields.text(part.get("text"), f"{at}.text"))
        case "refusal":
            return fields.text_part(fields.text(part.get("refusal"), f"{at}.refusal"))
        case "input_image" if part.get("image_url") is not None:
            return fields.image_part(fields.text(part["image_url"], f"{at}.image_url"), part.get("detail"))
        case "input_image":
            raise fields.untranslatable(f"{at}.file_id", "names a stored file", "Send `image_url` with a data: URL.")
        case "input_audio":
            return {"type": "input_audio", "input_audio": part.get("input_audio")}
        case "input_file":
            raise fields.untranslatable(at, "is a file", "Send its text as `input_text`, or its pages as images.")
    raise fields.refuse(f"{at}.type", "must be input_text, output_text, refusal, input_image or input_audio.")


def _format(text: Object) -> Object:
    made = fields.present(text, "verbosity")
    wanted = fields.mapping(text.get("format") or {"type": "text"}, "text.format")
    match wanted.get("type"):
        case "text":
            pass
        case "json_object":
            made["response_format"] = {"type": "json_object"}
        case "json_schema":
            schema = {"name": "answer", **fields.present(wanted, "name", "description", "schema", "strict")}
            made["response_format"] = {"type": "json_schema", "json_schema": schema}
        case _:
            raise fields.refuse("text.format.type", "must be text, json_object or json_schema.")
    return made


def _tools(asked: Object) -> tuple[list[Object], object]:
    tools: list[Object] = []
    for tool, at in fields.objects(asked.get("tools") or [], "tools"):
        if tool.get("type") != "function":
            what = f"asks for the built-in tool {str(tool.get('type'))[:60]}"
            raise fields.untranslatable(f"{at}.type", what, "Leave it out, or offer a function of your own.")
        name = fields.text(tool.get("name"), f"{at}.name")
        tools.append(fields.function(name, tool.get("parameters"), tool))
    choice = asked.get("tool_choice")
    if choice is None or isinstance(choice, str):
        return tools, choice
    choice = fields.mapping(choice, "tool_choice")
    match choice.get("type"):
        case "function":
            return tools, fields.chosen(fields.text(choice.get("name"), "tool_choice.name"))
        case "allowed_tools":
            allowed = set(_names(fields.objects(choice.get("tools"), "tool_choice.tools")))
            return [each for each in tools if each["function"]["name"] in allowed], choice.get("mode") or "auto"
    what = f"asks for the built-in tool {str(choice.get('type'))[:60]}"
    raise fields.untranslatable("tool_choice.type", what, "Choose auto, none, required or a function.")


def _names(tools: Iterable[tuple[Object, str]]) -> Iterable[str]:
    for tool, at in tools:
        yield fields.text(tool.get("name"), f"{at}.name")
