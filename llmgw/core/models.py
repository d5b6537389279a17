"""The three rows that every process shares: the revision of what gateways know, the leases, the store's secrets."""

from __future__ import annotations

import secrets

from django.db import models
from django.db.models import F


class Revision(models.Model):
    """One row; its number grows with every change a gateway must see (keys, catalog, endpoints)."""

    number = models.BigIntegerField(default=0)

    def __str__(self) -> str:
        return f"revision {self.number}"

    @classmethod
    def current(cls) -> int:
        return cls.objects.values_list("number", flat=True).filter(pk=1).first() or 0

    @classmethod
    def bump(cls) -> None:
        """Count one change; call inside the transaction that makes it."""
        if not cls.objects.filter(pk=1).update(number=F("number") + 1):
            cls.objects.get_or_create(pk=1, defaults={"number": 1})


class Lease(models.Model):
    """Who may act alone until `expires_at`. `fence` grows whenever it is taken anew and `turn` with everything that the
    holder does, so that one which slept through its time, or decided on what is no longer so, can be refused."""

    name = models.CharField(max_length=40, primary_key=True)
    holder = models.CharField(max_length=120)
    fence = models.BigIntegerField(default=0)
    turn = models.BigIntegerField(default=0)
    since = models.DateTimeField()
    expires_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"{self.name} held by {self.holder}"


class Secret(models.Model):
    """A random value made on first use and kept in the store, so that every control plane knows the same one."""

    name = models.CharField(max_length=40, primary_key=True)
    value = models.CharField(max_length=200)
    made_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.name

    @classmethod
    def named(cls, name: str) -> bytes:
        row, _ = cls.objects.get_or_create(name=name, defaults={"value": secrets.token_hex(32)})
        return bytes.fromhex(row.value)
