"""Signing in, the account, projects with their limits, quotas and budgets, keys."""

from __future__ import annotations

from django.urls import path

from tenants import limit_views, views

urlpatterns = [
    path("sign-in/", views.sign_in_page, name="sign-in"),
    path("sign-in/code/", views.sign_in_code, name="sign-in-code"),
    path("sign-out/", views.sign_out, name="sign-out"),
    path("first-sign-in/<str:code>", views.first_sign_in, name="first-sign-in"),
    path("account/", views.account, name="account"),
    path("account/password/", views.password, name="password"),
    path("account/two-factor/", views.two_factor, name="two-factor"),
    path("account/two-factor/remove/", views.two_factor_remove, name="two-factor-remove"),
    path("account/backup-codes/", views.backup_codes, name="backup-codes"),
    path("account/sessions/end/", views.end_session, name="session-end"),
    path("keys/", views.key_list, name="key-list"),
    path("projects/", limit_views.project_list, name="project-list"),
    path("limits/<str:kind>/<int:pk>/", limit_views.limit_detail, name="limits"),
    path("limits/<str:kind>/<int:pk>/change/", limit_views.limits_change, name="limits-change"),
    path("limits/<str:kind>/<int:pk>/budgets/", limit_views.budget_make, name="budget-make"),
    path("teams/<int:pk>/cards/", limit_views.quota_set, name="quota-set"),
    path("budgets/<int:pk>/", limit_views.budget_change, name="budget-change"),
    path("budgets/<int:pk>/remove/", limit_views.budget_remove, name="budget-remove"),
    path("keys/<int:pk>/revoke/", views.key_revoke, name="key-revoke"),
]
