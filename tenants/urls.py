"""Signing in, the account, keys."""

from __future__ import annotations

from django.urls import path

from tenants import views

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
    path("keys/<int:pk>/revoke/", views.key_revoke, name="key-revoke"),
]
