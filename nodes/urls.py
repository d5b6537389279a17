"""The cluster's pages, for operators."""

from __future__ import annotations

from django.urls import path

from nodes import node_views, views

urlpatterns = [
    path("dashboard/", views.dashboard, name="dashboard"),
    path("add-node/", views.node_make, name="node-make"),
    path("nodes/", views.node_list, name="node-list"),
    path("nodes/<str:name>/", views.node_detail, name="node-detail"),
    path("nodes/<str:name>/manage/", node_views.node_manage, name="node-manage"),
    path("models/", views.model_list, name="model-list"),
    path("models/<path:name>/", views.model_detail, name="model-detail"),
    path("fabrics/", views.fabric_list, name="fabric-list"),
    path("replicas/", views.replica_list, name="replica-list"),
    path("replicas/<path:name>/", views.replica_detail, name="replica-detail"),
]
