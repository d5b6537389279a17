"""What people are told while the store cannot be used: a full disk, a lock that stays, a database that is away."""

from __future__ import annotations

import logging
import sys

from django.conf import settings
from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse
from django.template import loader
from django.views.defaults import server_error

log = logging.getLogger(__name__)

FULL = ("disk is full", "No space left", "could not extend file")


def sentence(error: BaseException | None) -> str | None:
    """Why, and what to do, as true of what is looked at as of what is changed; None where the store is not at fault."""
    if not isinstance(error, OperationalError | InterfaceError):
        return None
    if any(word in str(error) for word in FULL):
        return "The disk of the store is full, so this could not be done. Free space there, then try again."
    return "The store cannot be used now, so this could not be done. Try again; if it stays, the server's log says why."


def page(request: HttpRequest) -> HttpResponse:
    """The answer to whatever a page did not expect. Django calls it while it deals with the exception."""
    why = sentence(sys.exc_info()[1])
    if why is None:
        return server_error(request)
    log.error("The store cannot be used for the page %s: %s", request.path, sys.exc_info()[1])
    # Without the request: who asks stands in the store too.
    told = {"why": why, "minutes": f"{settings.LLMGW.gateway.stale_for_s / 60:g}"}
    return HttpResponse(loader.get_template("503.html").render(told), status=503)
