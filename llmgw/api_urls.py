"""The API under /api/: each room's routes below v1/, the schema and its browser beside them."""

from __future__ import annotations

from django.urls import URLPattern

urlpatterns: list[URLPattern] = []
