"""The catalog's pages, for operators. A model's name stands last: it may hold slashes."""

from __future__ import annotations

from django.urls import path

from catalog import views

urlpatterns = [
    path("catalog/", views.catalog_list, name="catalog-list"),
    path("catalog/add/", views.model_add, name="catalog-add"),
    path("catalog/text/", views.catalog_text, name="catalog-text"),
    path("catalog/versions/", views.version_list, name="catalog-version-list"),
    path("catalog/versions/<int:number>/", views.version_detail, name="catalog-version"),
    path("catalog/edit/<path:name>/", views.model_edit, name="catalog-edit"),
    path("catalog/adapters/<path:name>/", views.adapter_list, name="catalog-adapters"),
    path("catalog/remove/<path:name>/", views.model_remove, name="catalog-remove"),
]
