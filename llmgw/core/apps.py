import sqlite3

from django.apps import AppConfig
from django.contrib.admin.apps import AdminConfig


class CoreConfig(AppConfig):
    name = "llmgw.core"
    label = "core"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        # Of None and bool sqlite3 asks each time how they are to be adapted, which takes longer than storing them: the
        # answer is what it comes to itself, given in C.
        sqlite3.register_adapter(type(None), {}.get)  # type: ignore[arg-type]  # always None
        sqlite3.register_adapter(bool, int)


class OperatorsAdmin(AdminConfig):
    default_site = "llmgw.core.admin_site.OperatorsSite"
