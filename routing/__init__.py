"""The data plane. Its request path is imported compiled where it is (llmgw.core.compiled)."""

from llmgw.core import compiled

compiled.use()
