"""Leases and the revision, to look at. Secrets are not in the admin."""

from __future__ import annotations

from django.contrib import admin

from llmgw.core.admin_site import ReadOnly
from llmgw.core.models import Lease, Revision


@admin.register(Lease)
class LeaseAdmin(ReadOnly):
    list_display = ["name", "holder", "fence", "expires_at"]


@admin.register(Revision)
class RevisionAdmin(ReadOnly):
    list_display = ["pk", "number"]
