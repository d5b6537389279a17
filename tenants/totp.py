"""The second factor: one authenticator a person (TOTP) and ten backup codes, of which only digests are stored."""

from __future__ import annotations

import base64
import secrets
from dataclasses import dataclass

import qrcode
from django.db import transaction
from django.db.models import QuerySet
from django.utils.safestring import SafeString
from django_otp.models import Device as Device
from django_otp.plugins.otp_static.models import StaticDevice, StaticToken
from django_otp.plugins.otp_totp.models import TOTPDevice
from qrcode.image.svg import SvgPathImage

from tenants import audit
from tenants.audit import Actor
from tenants.keys import digest
from tenants.models import User

CODES = 10
CODE_LENGTH = 12
_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"
_STORED = 16
"""Length of a stored digest: the column has room for 16 characters, 64 bits of it."""


@dataclass(frozen=True, slots=True)
class Enrolment:
    """What an authenticator needs: a picture of the address, or the secret to type."""

    qr: SafeString
    secret: str


def is_enrolled(user: User) -> bool:
    return bool(TOTPDevice.objects.filter(user=user, confirmed=True).exists())


def start_enrolment(user: User) -> Enrolment:
    """The secret that waits to be confirmed; the same one on every look, so that a reload does not void a scan."""
    # Two pages opened at once may each have made one; the same one is scanned and confirmed.
    device = _waiting(user).first() or TOTPDevice.objects.create(user=user, confirmed=False, name="authenticator")
    device = _waiting(user).first() or device
    secret = base64.b32encode(device.bin_key).decode().rstrip("=")
    grouped = " ".join(secret[at : at + 4] for at in range(0, len(secret), 4))
    return Enrolment(qr=_svg(device.config_url), secret=grouped)


@transaction.atomic
def confirm(user: User, code: str, *, actor: Actor) -> TOTPDevice | None:
    """Take the waiting secret into use when `code` shows that the authenticator has it. Replaces an earlier one."""
    device = _waiting(user).select_for_update().first()
    if device is None:
        return None
    # Its secret is shown beside the field, so there is nothing to guess: a wrong code must not make the right one wait.
    device.throttle_reset(commit=False)
    if not device.verify_token(_digits(code)):
        return None
    TOTPDevice.objects.filter(user=user).exclude(pk=device.pk).delete()
    device.confirmed = True
    device.save()
    audit.record(actor, "enrol second factor", user.username)
    return device


@transaction.atomic
def verify(user: User, code: str) -> Device | None:
    """The device that takes `code`. Six digits are the authenticator's, anything longer is a backup code."""
    entered = _digits(code)
    if len(entered) == 6:
        rows, token = TOTPDevice.objects.filter(user=user, confirmed=True), entered
    else:
        rows, token = StaticDevice.objects.filter(user=user, confirmed=True), _stored(code)
    device = rows.select_for_update().first()
    return device if device is not None and device.verify_token(token) else None


@transaction.atomic
def make_backup_codes(user: User, *, actor: Actor) -> tuple[str, ...]:
    """Ten fresh codes, shown once; earlier ones stop working."""
    StaticDevice.objects.filter(user=user).delete()
    device = StaticDevice.objects.create(user=user, name="backup codes")
    codes = tuple("".join(secrets.choice(_ALPHABET) for _ in range(CODE_LENGTH)) for _ in range(CODES))
    StaticToken.objects.bulk_create(StaticToken(device=device, token=_stored(code)) for code in codes)
    audit.record(actor, "make backup codes", user.username)
    return tuple("-".join(code[at : at + 4] for at in range(0, CODE_LENGTH, 4)) for code in codes)


def backup_codes_left(user: User) -> int:
    return int(StaticToken.objects.filter(device__user=user).count())


@transaction.atomic
def remove(user: User, *, actor: Actor) -> None:
    TOTPDevice.objects.filter(user=user).delete()
    StaticDevice.objects.filter(user=user).delete()
    audit.record(actor, "remove second factor", user.username)


def _waiting(user: User) -> QuerySet[TOTPDevice]:
    rows: QuerySet[TOTPDevice] = TOTPDevice.objects.filter(user=user, confirmed=False).order_by("pk")
    return rows


def _digits(code: str) -> str:
    """A code of digits without the blanks people type; empty when it is anything else."""
    bare = code[:40].replace(" ", "")
    return bare if bare.isascii() and bare.isdigit() else ""


def _stored(code: str) -> str:
    return digest(code[:40].replace("-", "").replace(" ", "").strip().lower())[:_STORED]


def _svg(text: str) -> SafeString:
    code = qrcode.QRCode(box_size=10, border=2, image_factory=SvgPathImage)
    code.add_data(text)
    drawing: str = code.make_image().to_string(encoding="unicode")
    # The drawing is our own: it holds path data alone, none of the text that it encodes.
    return SafeString(drawing)
