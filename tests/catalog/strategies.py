"""Generated catalogs that are valid by construction."""

from __future__ import annotations

from hypothesis import strategies as st

from catalog import names, spec

spelt = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=12)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)
labels = spelt.filter(lambda name: names.address_objection(name, model=True) is None)
label_values = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=12)
small = st.integers(1, 8)
TEAMS = ("red", "a-b_9")
"""Short names of teams that own generated models; where these are stored, the teams must be there."""


@st.composite
def profiles(draw: st.DrawFn, name: str) -> spec.Profile:
    engine = draw(st.sampled_from(spec.ENGINES))
    cpu = engine == "llamacpp" and draw(st.booleans())
    nodes = 1 if engine == "llamacpp" else draw(small)
    per_node = 1 if engine == "llamacpp" else draw(small)
    tp, pp = (nodes * per_node, 1) if draw(st.booleans()) else (per_node, nodes)
    return spec.normalise_profile(
        spec.Profile(
            name=name,
            engine=engine,
            gpu_class=None if cpu else draw(st.sampled_from(("h100-80g", "l40s-45g", "rtx-4090-24g"))),
            tp=tp,
            pp=pp,
            nodes=nodes,
            gpus_per_node=per_node,
            args=tuple(draw(st.lists(texts.filter(lambda text: not text.startswith("--")), max_size=3))),
            env=tuple(draw(st.dictionaries(st.from_regex(r"\A[A-Z_]{1,8}\Z"), texts, max_size=3)).items()),
            weight=draw(st.integers(-2, 500)),
            priority=draw(st.integers(-50, 50)),
            startup_timeout_s=draw(st.integers(-5, 100_000)),
            reserved_cores=draw(st.sampled_from((0.0, 0.5, 3.0))),
            required_memory_gb=draw(st.none() | st.floats(0.1, 4000)),
            launch_mode=draw(st.sampled_from(spec.LAUNCH_MODES)),
            capacity_class=draw(st.sampled_from(spec.CAPACITY_CLASSES)),
            min_disk_gb=draw(st.none() | st.floats(0.1, 4000)),
            labels=tuple(draw(st.dictionaries(st.sampled_from(("zone", "a.b/c")), label_values, max_size=2)).items()),
            only_nodes=draw(st.sampled_from(((), tuple(f"gpu-{number}" for number in range(nodes + 1))))),
            metrics=draw(
                st.sampled_from(((), ("a:running",), ("new:running", "old_running"))).map(
                    lambda held: spec.Metrics(running=held, waiting=held[:1])
                )
            ),
            max_loaded_adapters=None if engine == "llamacpp" else draw(st.sampled_from((None, -1, 0, 1, 4))),
        )
    )


@st.composite
def models(draw: st.DrawFn, held: list[str]) -> spec.Model:
    """A model that takes its names off the end of `held`."""
    low = draw(st.integers(-2, 5))
    external = draw(st.sampled_from((None, None, spec.External("https://provider.example/v1", "gpt", "/etc/key"))))
    name, alias, adapter = held.pop(), held.pop(), held.pop()
    return spec.normalise(
        spec.Model(
            name=name,
            aliases=draw(st.sampled_from(((), (alias,)))),
            source="" if external else draw(st.sampled_from(("/m/a.gguf", "./a.gguf", "org/name", "https://h/a.gguf"))),
            external=external,
            team=draw(st.sampled_from(("", *TEAMS))),
            profiles=()
            if external
            else tuple(
                draw(profiles(each)) for each in draw(st.lists(labels, min_size=1, max_size=3, unique_by=names.fold))
            ),
            scaling=spec.scaling(low, draw(st.sampled_from((None, max(low, 0) + 2))), draw(st.integers(1, 100_000))),
            fallbacks=(name,) if draw(st.booleans()) else (),
            routing_profile=draw(st.sampled_from(spec.ROUTING_PROFILES)),
            slo=spec.Slo(draw(st.none() | st.integers(1, 10**6)), draw(st.none() | st.integers(1, 10**6))),
            band=draw(st.sampled_from(("", "batch"))),
            required_memory_gb=draw(st.none() | st.floats(0.1, 4000)),
            adapters=() if external else draw(st.sampled_from(((), (spec.Adapter(adapter, "/m/a-lora.gguf"),)))),
        )
    )


@st.composite
def catalogs(draw: st.DrawFn) -> tuple[spec.Model, ...]:
    count = draw(st.integers(0, 3))
    held = draw(st.lists(labels, min_size=count * 3, max_size=count * 3, unique_by=names.fold))
    return tuple(draw(models(held)) for _ in range(count))
