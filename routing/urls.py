"""Home, new keys, requests."""

from __future__ import annotations

from django.urls import path

from routing import request_views, views

urlpatterns = [
    path("", views.home, name="home"),
    path("about/", views.about, name="about"),
    path("keys/make/", views.key_make, name="key-make"),
    path("keys/<int:pk>/", views.key_detail, name="key-detail"),
    path("keys/<int:pk>/first-call/", views.key_first_call, name="key-first-call"),
    path("requests/", request_views.request_list, name="request-list"),
    path("requests.csv", request_views.request_export, name="request-export"),
    path("requests/<path:request_id>/", request_views.request_detail, name="request-detail"),
]
