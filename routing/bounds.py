"""What the settings allow a request: read once, since each request looks at most of them."""

from __future__ import annotations

from llmgw.config import Gateway


class Bounds:
    """Sizes in bytes, times in seconds; what each means is said in llmgw.config.Gateway."""

    def __init__(self, settings: Gateway) -> None:
        self.auth = settings.auth
        self.body_limit_bytes = settings.body_limit_bytes
        self.waiting_bytes = settings.waiting_bytes
        self.assumed_output_tokens = settings.assumed_output_tokens
        self.attempts = settings.attempts
        self.connect_timeout_s = settings.connect_timeout_s
        self.first_byte_timeout_s = settings.first_byte_timeout_s
        self.idle_timeout_s = settings.idle_timeout_s
        self.queue_wait_s = settings.queue_wait_s
        self.fallback_after_s = settings.fallback_after_s
        self.on_demand_wait_s = settings.on_demand_wait_s
        self.stale_for_s = settings.stale_for_s
