"""What a request may name for an engine to fetch."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing import media
from routing.media import MAX_DEPTH, forbidden, policy
from routing.openai import Refusal

OFF = policy("off")
BASE64 = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
DATA = f"data:image/png;base64,{BASE64}"
ADDRESSES = (
    "http://127.0.0.1:8000/metrics",
    "http://169.254.169.254/latest/meta-data/",
    "http://[::ffff:127.0.0.1]/",
    "http://2130706433/",
    "http://0x7f.1/",
    "https://example.org/a.png",
    "HTTP://example.org/a.png",
    " http://example.org/",
    "\thttp://example.org/",
    "ht\ntp://example.org/",
    "//example.org/a.png",
    "file:///etc/hostname",
    "file:/etc/hostname",
    "ftp://example.org/a.png",
    "s3://bucket/a.png",
    "/etc/passwd",
    "/dev/zero",
    "../secret.png",
    "a.png",
    "~/a.png",
)


def body(*parts: Any, **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": list(parts)}], **more}).encode()


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "image_url", "image_url": {"url": ...}}, "image_url.url"),
        ({"type": "image_url", "image_url": ...}, "image_url"),
        ({"image_url": {"url": ..., "detail": "auto"}}, "image_url.url"),
        ({"type": "audio_url", "audio_url": {"url": ...}}, "audio_url.url"),
        ({"type": "video_url", "video_url": {"url": ...}}, "video_url.url"),
        ({"type": "input_audio", "input_audio": {"data": ..., "format": "wav"}}, "input_audio.data"),
        ({"type": "input_image", "image_url": ...}, "image_url"),
        ({"type": "input_file", "file_url": ...}, "file_url"),
        ({"type": "input_file", "file_data": ...}, "file_data"),
        ({"type": "file", "file": {"file_data": ..., "filename": "a.pdf"}}, "file.file_data"),
        ({"type": "image", "image": ...}, "image"),
        ({"type": "image", "images": [DATA, ...]}, "images[1]"),
        ({"type": "image", "source": {"type": "url", "url": ...}}, "source.url"),
        ({"type": "document", "source": {"url": ...}}, "source.url"),
        (
            {"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": ...}}]},
            "content[0].source.url",
        ),
    ],
)
def test_a_part_that_names_an_address_is_refused_by_its_field(part: dict[str, Any], field: str, address: str) -> None:
    filled = _filled(part, address)
    found = forbidden(body({"type": "text", "text": "look"}, filled), OFF)
    assert found == f"messages[0].content[1].{field}"
    assert forbidden(body(filled), policy("any")) is None
    assert forbidden(body(_filled(part, DATA)), OFF) is None


def _filled(part: Any, address: str) -> Any:
    if part is ...:
        return address
    if isinstance(part, dict):
        return {name: _filled(each, address) for name, each in part.items()}
    return [_filled(each, address) for each in part] if isinstance(part, list) else part


@pytest.mark.parametrize(
    "harmless",
    [
        body(),
        body({"type": "text", "text": "see http://example.org/a.png and image_url"}),
        b'{"model":"m","prompt":"curl \\"url\\" http://127.0.0.1"}',
        body({"type": "image_url", "image_url": {"url": DATA, "detail": "auto"}}),
        body({"type": "image_url", "image_url": {"url": DATA.replace("data", "DATA", 1)}}),
        body({"type": "image_url", "image_url": {"url": "", "uuid": "a.b:c"}}),
        body({"type": "image_url", "image_url": None, "uuid": "x"}),
        body({"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}),
        body({"type": "input_audio", "input_audio": {"data": "/9j/" + BASE64}}),
        body({"type": "file", "file": {"file_id": "file-1.2", "filename": "a.pdf"}}),
        body({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}}),
        body({"type": "search_result", "source": "https://example.org", "title": "x", "url": "https://x"}),
        body({"type": "tool_use", "input": {"image_url": "https://example.org/a.png"}}),
        body({"type": "output_text", "annotations": [{"type": "url_citation", "url": "https://example.org"}]}),
        body(tools=[{"type": "function", "function": {"parameters": {"default": {"image_url": "https://x"}}}}]),
        body(metadata={"image_url": "https://example.org"}),
        body(audio={"voice": "alloy", "format": "wav"}, modalities=["text", "audio"]),
        b'{"model":"m","prompt":"caf\\u00e9"}',
        b'{"model":"m","prompt":"\\u0041 \\ud800"}',
        b"[]",
        b'"image_url"',
    ],
)
def test_what_names_nothing_to_fetch_passes(harmless: bytes) -> None:
    assert forbidden(harmless, OFF) is None


@pytest.mark.parametrize(
    "hidden",
    [
        b'{"messages":[{"content":[{"image\\u005furl":"http://x"}]}]}',
        b'{"messages":[{"content":[{"\\u0069mage_url":"http:\\/\\/x"}]}]}',
        b'{"messages":[{"content":[{"image_url":"\\u0068ttp://x"}]}]}',
        b'{"messages":[{"content":[{"text":"\\ud800"},{"image_url":"http://x"}]}]}',
        b'{"messages":[{"content":[{"image_url":{"url":"data:,x"},"image_url":{"url":"http://x"}}]}]}',
        b'{"image_url" : "http://x"}',
        b'{"input":[{"image":"http://x"}]}',
        b'{"input":[{"type":"function_call_output","output":[{"type":"input_image","image_url":"http://x"}]}]}',
        b'{"documents":{"content":[{"type":"image_url","image_url":{"url":"http://x"}}]}}',
        b'{"messages":' + b'[{"a":' * 100 + b'{"image_url":"http://x"}' + b"}]" * 100 + b"}",
        b'{"image_url":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"image_url":"http://x"',
    ],
)
def test_an_address_is_found_however_it_is_written_or_nested(hidden: bytes) -> None:
    assert forbidden(hidden, OFF) is not None


def test_what_nests_deeper_than_anybody_writes_is_refused_rather_than_searched() -> None:
    def nested(depth: int) -> bytes:
        return b'{"image":' + b"[" * depth + b"]" * depth + b"}"

    assert forbidden(nested(MAX_DEPTH), OFF) is None
    assert forbidden(nested(MAX_DEPTH + 1), OFF) is not None


@pytest.mark.parametrize(
    ("address", "passes"),
    [
        ("https://images.example.org/a.png", True),
        ("https://IMAGES.example.org:8443/a/b.png?x=1&y=@z", True),
        ("http://images.example.org", True),
        ("https://images.example.org@evil.example/", False),
        ("https://images.example.org:x@evil.example/", False),
        ("https://images.example.org\\@evil.example/", False),
        ("https://images.example.org/\\evil", False),
        ("https://images.example.org#@evil.example/", False),
        ("https://images.example.org?@evil.example/", False),
        ("https://images.example.org.evil.example/", False),
        ("https://evil.example/images.example.org", False),
        ("https://sub.images.example.org/", False),
        ("https://images.example.org\t.evil.example/", False),
        ("https://images.example.org/a b", False),
        ("https://images.example.org/\n", False),
        ("ftp://images.example.org/", False),
        ("images.example.org/a.png", False),
    ],
)
def test_only_listed_hosts_pass_however_the_address_is_dressed_up(address: str, passes: bool) -> None:
    allowed = policy(["Images.Example.org"])
    found = forbidden(body({"type": "image_url", "image_url": {"url": address}}), allowed)
    assert (found is None) == passes


def test_the_refusal_names_the_field_and_says_what_to_do() -> None:
    refusal = media.refusal("messages[0].content[1].image_url.url")
    assert (refusal.code, refusal.kind.status, refusal.param) == ("body_invalid", 400, refusal.message.split("`")[1])
    assert "data: URL" in refusal.message


def test_the_field_that_is_named_stays_short() -> None:
    found = forbidden(json.dumps({"x" * 5000: [{"image_url": "http://x"}] * 3}).encode(), OFF)
    assert found == "x" * 40 + "[0].image_url"


leaves = st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=20)
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)


@given(trees, st.lists(st.sampled_from(["a", "content", "output", 0]), max_size=6), st.booleans())
def test_wherever_a_picture_stands_its_address_is_found_and_its_content_passes(
    tree: Any, way: list[str | int], escaped: bool
) -> None:
    def placed(url: str) -> bytes:
        value: Any = {"image_url": {"url": url}, "more": tree}
        for step in way:
            value = [value] if step == 0 else {step: value}
        text = json.dumps({"messages": value}, ensure_ascii=escaped)
        return text.encode("utf-8", "surrogatepass")

    assert forbidden(placed("http://127.0.0.1/"), OFF) is not None
    assert forbidden(placed(DATA), OFF) in (None, "body")


def test_no_word_beside_it_hides_what_a_body_asks_for() -> None:
    asked = [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1/"}]}]
    for kind in ("tool_use", "message"):
        request = json.dumps({"model": "m", "type": kind, "input": asked}).encode()
        assert forbidden(request, OFF) == "input[0].content[0].image_url"


@pytest.mark.parametrize(("field", "much"), [("x", "{},"), ("x", "[],"), ("images", '"data:",')])
def test_more_than_can_be_looked_through_is_refused(field: str, much: str) -> None:
    request = f'{{"model": "m", "image_url": "", "{field}": [{much * media.MAX_VALUES}1]}}'
    with pytest.raises(Refusal, match="send less"):
        forbidden(request.encode(), OFF)


def test_long_lists_of_numbers_and_texts_that_are_no_media_are_no_matter() -> None:
    request = {"model": "m", "image_url": "", "x": [1] * media.MAX_VALUES, "y": ["a"] * media.MAX_VALUES}
    assert forbidden(json.dumps(request).encode(), OFF) is None
