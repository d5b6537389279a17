"""The Celery app: periodic passes and background jobs, over Redis where there is one and over files where not."""

from __future__ import annotations

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "llmgw.settings")

import django
from celery import Celery
from django.conf import settings

from llmgw.config import Settings
from llmgw.core import file_queue

django.setup(set_prefix=False)

from nodes.poke import ASKED_FOR_S  # noqa: E402 - needs Django set up


def broker(config: Settings) -> dict[str, object]:
    """Where jobs are queued, as Celery's settings say it."""
    if config.redis.url:
        return {
            "broker_url": config.redis.url,
            "broker_transport_options": {
                "visibility_timeout": 3600,
                "socket_connect_timeout": 3,
                "socket_timeout": 10,  # of a Redis that is gone without a word; far more than the waits for jobs take
                "socket_keepalive": True,
                "max_retries": 0,  # whoever enqueues goes on without the queue
            },
        }
    queue = config.data_dir / "queue"
    for name in ("messages", "control"):
        (queue / name).mkdir(parents=True, exist_ok=True)
    return {
        "broker_url": f"{file_queue.SCHEME}://localhost/",
        "broker_transport_options": {
            "data_folder_in": str(queue / "messages"),
            "data_folder_out": str(queue / "messages"),
            "control_folder": str(queue / "control"),
            "store_processed": False,
        },
    }


_config = settings.LLMGW
app = Celery("llmgw")
app.conf.update(
    **broker(_config),
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    task_ignore_result=True,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
    worker_send_task_events=False,
    timezone="UTC",
    beat_max_loop_interval=1,
    beat_schedule={
        "reconcile": {
            "task": "nodes.tasks.reconcile",
            "schedule": _config.nodes.reconcile_s,
            # A worker that was away must not find hundreds of them.
            "options": {"expires": ASKED_FOR_S, "retry": False},
        },
        "tidy": {"task": "nodes.tasks.tidy", "schedule": 3600.0, "options": {"expires": 3600.0, "retry": False}},
        "tidy-usage": {
            "task": "tenants.tasks.tidy_usage",
            "schedule": 600.0,
            "options": {"expires": 600.0, "retry": False},
        },
    },
)
app.autodiscover_tasks(["nodes", "tenants", "catalog"])
