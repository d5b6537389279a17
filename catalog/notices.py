"""What is harmless in a valid catalog and still worth a word. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from catalog import names, spec
from catalog.spec import Model, Problem
from catalog.validate import targets_of
from llmgw.core import addresses


def notices(models: Sequence[Model]) -> tuple[Problem, ...]:
    """What is harmless and still worth a word: a model that falls back on itself, or in a circle, or twice, and an
    external one that gateways will refuse to reach, or that its key is not safe on the way to."""
    targets = targets_of(models)
    found: list[Problem] = []
    for model in models:
        if model.external:
            found += [Problem(model.name, "", *remark) for remark in _remarks_on(model.external)]
        found += _twice(model)
        steps = [targets[names.fold(name)] for name in model.fallbacks if names.fold(name) in targets]
        if model.name in steps:
            found.append(Problem(model.name, "", "fallbacks", "It falls back on itself, which changes nothing."))
        twice = dict.fromkeys(step for step in steps if steps.count(step) > 1)
        found += [
            Problem(model.name, "", "fallbacks", f"{name} is named more than once; once is enough.") for name in twice
        ]
    found += [
        Problem(circle[0], "", "fallbacks", f"The circle {' -> '.join((*circle, circle[0]))} is tried once around.")
        for circle in _circles(models, targets)
    ]
    return tuple(found)


def _twice(model: Model) -> Iterator[Problem]:
    first: dict[str, str] = {}
    for adapter in model.adapters:
        other = first.setdefault(adapter.source, adapter.name)
        if other != adapter.name:
            text = f"{adapter.name} is the same file as {other}; each takes room of its own in the engine."
            yield Problem(model.name, "", "adapters", text)


def _remarks_on(external: spec.External) -> Iterator[tuple[str, str]]:
    """What an external model can be published with and hardly be meant."""
    try:
        address = addresses.parse(external.url)
    except addresses.AddressError:
        return  # refused
    inside = addresses.refused(address.host, private=False)
    if inside is not None and inside != addresses.UNKNOWN:
        text = f"{address.host} is {inside} address; gateways refuse it"
        if addresses.refused(address.host, private=True) is None:
            text += ", unless gateway.external_private is on"
        yield "external.url", f"{text}."
    if not address.tls and external.api_key_file is not None:
        yield "external.url", "The key goes there unencrypted; use https:// where the provider has it."
    if not address.path:
        yield "external.url", "It has no path; most providers want one, such as /v1."


def _circles(models: Sequence[Model], targets: dict[str, str]) -> Iterator[tuple[str, ...]]:
    """Each circle of fallbacks of two models or more once, from its first model on."""
    onward = {
        model.name: [
            targets[names.fold(name)]
            for name in model.fallbacks
            if targets.get(names.fold(name), model.name) != model.name
        ]
        for model in models
    }
    done: set[str] = set()
    for start in onward:
        path: list[str] = []
        waiting = [(start, 0)]
        while waiting:
            name, depth = waiting.pop()
            del path[depth:]
            if name in path:
                yield tuple(path[path.index(name) :])
            elif name not in done:
                path.append(name)
                done.add(name)
                waiting += [(step, depth + 1) for step in reversed(onward.get(name, []))]
