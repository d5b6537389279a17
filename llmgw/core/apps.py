from django.apps import AppConfig
from django.contrib.admin.apps import AdminConfig


class CoreConfig(AppConfig):
    name = "llmgw.core"
    label = "core"
    default_auto_field = "django.db.models.BigAutoField"


class OperatorsAdmin(AdminConfig):
    default_site = "llmgw.core.admin_site.OperatorsSite"
