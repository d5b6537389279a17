"""Django's settings, derived from llmgw.config; nothing is configured here that a person would want to change."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from llmgw import config
from llmgw.core.admin_look import UNFOLD as UNFOLD
from llmgw.core.secret_file import read_or_make

LLMGW = config.current()
BASE_DIR = Path(__file__).resolve().parent.parent
LLMGW.data_dir.mkdir(parents=True, exist_ok=True)

SECRET_KEY = read_or_make(LLMGW.secrets_dir / "django-key")
DEBUG = LLMGW.debug
ALLOWED_HOSTS = ["*"]  # no link is built from the Host header; llmgw.config's public_url and base_url are used

INSTALLED_APPS = [
    "unfold.apps.BasicAppConfig",
    "llmgw.core.apps.OperatorsAdmin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.humanize",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "channels",
    "django_htmx",
    "django_otp",
    "django_otp.plugins.otp_static",
    "django_otp.plugins.otp_totp",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "rest_framework",
    "llmgw.core.apps.CoreConfig",
    "tenants",
    "catalog",
    "nodes",
    "routing",
]

MIDDLEWARE = [
    "llmgw.core.proxies.TrustedProxies",
    "llmgw.core.odd_requests.OddRequests",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django_otp.middleware.OTPMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "llmgw.core.csp.ContentSecurityPolicy",
]

ROOT_URLCONF = "llmgw.urls"
ASGI_APPLICATION = "llmgw.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "tenants.context.navigation",
                "nodes.context.sidebar_counts",
                "nodes.context.card_quotas",
            ],
        },
    },
]


def _database() -> dict[str, object]:
    store = LLMGW.store
    if not store.url:
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": LLMGW.data_dir / "llmgw.sqlite3",
            "CONN_MAX_AGE": 60,  # to open one costs more than most queries do
            "OPTIONS": {
                "transaction_mode": "IMMEDIATE",
                "timeout": 20,
                "init_command": (
                    "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA journal_size_limit=67108864;"
                    # A second's usage rows fit, and pages that many of them touch are copied back less often.
                    "PRAGMA cache_size=-8000; PRAGMA wal_autocheckpoint=4000;"
                ),
            },
        }
    parts = urlsplit(store.url)
    password = store.password_file.read_text().strip() if store.password_file else unquote(parts.password or "")
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.lstrip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": password,
        "HOST": parts.hostname or "",
        "PORT": parts.port or "",
        "CONN_HEALTH_CHECKS": True,
        "CONN_MAX_AGE": 60,
        # A host that is gone without a word is noticed in seconds; by default it takes up to two hours.
        "OPTIONS": {
            "connect_timeout": 5,
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": 10_000,
            # Nor may a process that stands still, or a host that is gone, keep rows locked that others wait for.
            "options": "-c idle_in_transaction_session_timeout=30s",
        },
    }


DATABASES = {"default": _database()}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

AUTH_USER_MODEL = "tenants.User"
PASSWORD_HASHERS = [
    "django.contrib.auth.hashers.Argon2PasswordHasher",
    "django.contrib.auth.hashers.PBKDF2PasswordHasher",
]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 10}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "sign-in"
LOGIN_REDIRECT_URL = "home"
OTP_TOTP_ISSUER = "llmgw"

_secure = LLMGW.base_url.startswith("https://")
SESSION_COOKIE_NAME = "llmgw_session"
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = _secure
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
CSRF_TRUSTED_ORIGINS = [LLMGW.listen.public_url.rstrip("/")] if LLMGW.listen.public_url else []
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
DATA_UPLOAD_MAX_MEMORY_SIZE = 2 * 1024 * 1024

USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en"
USE_THOUSAND_SEPARATOR = False

STATIC_URL = "/static/"
STATICFILES_DIRS = [BASE_DIR / "templates" / "static"]
WHITENOISE_USE_FINDERS = True
WHITENOISE_AUTOREFRESH = DEBUG

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "tenants.api_rules.TokenAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["tenants.api_rules.SignedInWithinScope"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "DEFAULT_PAGINATION_CLASS": "tenants.api_rules.ByIdPagination",
    "PAGE_SIZE": 100,
    "EXCEPTION_HANDLER": "tenants.api_rules.explain_error",
}
SPECTACULAR_SETTINGS = {
    "TITLE": "llmgw API",
    "VERSION": "1",
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "REDOC_DIST": "SIDECAR",
    "SERVE_INCLUDE_SCHEMA": False,
}

LOGGING_CONFIG = "llmgw.core.logs.configure"
LOGGING = {"format": LLMGW.logging.format, "level": LLMGW.logging.level}
