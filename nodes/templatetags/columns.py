"""Heads of the columns of lists, by which a list is sorted where it has an order."""

from __future__ import annotations

from django import template
from django.template.context import RequestContext
from django.utils.html import format_html
from django.utils.safestring import SafeString

register = template.Library()


@register.simple_tag(takes_context=True)
def column(context: RequestContext, label: str, name: str, kind: str = "", says: str = "") -> SafeString:
    """A head that is a link in a whole list. `kind`: its classes; `says`: what exactly it sorts by."""
    order = context.get("order") if context.get("list") else None
    if order is None:
        return format_html("<th{}>{}</th>", format_html(' class="{}"', kind) if kind else "", label)
    query = context["request"].GET.copy()
    query.pop("after", None)
    query["sort"] = str(order.clicked(name, figures="num" in kind.split() or bool(says)))
    if not query["sort"]:
        del query["sort"]
    sorted_by = name == order.column
    direction = ("descending" if order.descending else "ascending") if sorted_by else ""
    return format_html(
        '<th{}{}><a href="?{}"{}>{}</a></th>',
        format_html(' class="{}"', kind) if kind else "",
        format_html(' aria-sort="{}"', direction) if direction else "",
        query.urlencode(),
        format_html(' title="{}"', says) if says else "",
        label,
    )
