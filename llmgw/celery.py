"""The Celery app: periodic passes and background jobs, over Redis where there is one and over files where not."""

from __future__ import annotations

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "llmgw.settings")

import django
from celery import Celery
from django.conf import settings

django.setup(set_prefix=False)

_config = settings.LLMGW
_queue = _config.data_dir / "queue"


def _broker() -> dict[str, object]:
    if _config.redis.url:
        return {
            "broker_url": _config.redis.url,
            "broker_transport_options": {"visibility_timeout": 3600, "socket_connect_timeout": 3},
        }
    for name in ("messages", "control"):
        (_queue / name).mkdir(parents=True, exist_ok=True)
    return {
        "broker_url": "filesystem://localhost/",
        "broker_transport_options": {
            "data_folder_in": str(_queue / "messages"),
            "data_folder_out": str(_queue / "messages"),
            "control_folder": str(_queue / "control"),
            "store_processed": False,
        },
    }


app = Celery("llmgw")
app.conf.update(
    **_broker(),
    broker_connection_retry_on_startup=True,
    task_ignore_result=True,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
    worker_send_task_events=False,
    timezone="UTC",
    beat_schedule_filename=str(_config.data_dir / "beat-schedule"),
    beat_max_loop_interval=1,
    beat_schedule={
        "reconcile": {
            "task": "nodes.tasks.reconcile",
            "schedule": _config.nodes.reconcile_s,
            # A worker that was away must not find hundreds of them.
            "options": {"expires": _config.nodes.reconcile_s * 2},
        },
        "tidy": {"task": "nodes.tasks.tidy", "schedule": 3600.0, "options": {"expires": 3600.0}},
        "tidy-usage": {"task": "tenants.tasks.tidy_usage", "schedule": 600.0, "options": {"expires": 600.0}},
    },
)
app.autodiscover_tasks(["nodes", "tenants", "catalog"])
