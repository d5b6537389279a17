"""Who may use what, and what it costs. Money is counted compiled where it is (llmgw.core.compiled)."""

from llmgw.core import compiled

compiled.use()
