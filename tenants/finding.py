"""Finding requests among millions: what is asked for, and pages of it whose cost does not grow with the table.

Rows are read newest first along an index of (project, at), or of time alone: one lane for each project that a person
sees, or one through all rows. Everything else is looked for among the next LOOKED_THROUGH of them only; a page then
says how far back it looked. By key and by model the search begins in the newest quarter of an hour whose sums have any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from django.db.models import Q, QuerySet

from tenants.keys import PREFIX_LENGTH
from tenants.models import Key, Project, Usage, UsageSlot, User
from tenants.usage import PAGE, QUARTER, Cursor, read_cursor, write_cursor

LOOKED_THROUGH = 100_000
MOST_LANES = 50
"""People who see more projects than this look through the rows of all."""
MOST_PROJECTS = 10_000
FOUND_BY_ID = 20
LIKE_AN_ID = 1000
"""Ids that begin alike are looked at no further than this."""
RESULTS = {"ok": (0, 400), "refused": (400, 499), "left": (499, 500), "failed": (500, 1000)}
"""From and below which HTTP status; `left`: the client went away (logged as 499)."""
FIELDS = ("project", "key", "model", "result", "code", "since", "until")


def result_of(status: int) -> str:
    return next((name for name, (first, end) in RESULTS.items() if first <= status < end), "failed")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which requests. `projects`: those that may be seen, None for all; an empty text and None filter nothing."""

    projects: tuple[int, ...] | None = None
    key: int | None = None
    model: str = ""
    result: str = ""
    code: str = ""
    since: datetime | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What could be understood of a question, and what is wrong with the rest, by its field."""

    wanted: Wanted
    problems: Mapping[str, str]
    missing: bool = False
    """Whether a project or key was named that this person does not see."""


@dataclass(frozen=True, slots=True)
class Found:
    rows: tuple[Usage, ...]
    older: str
    """Cursor of what follows; empty at the end."""
    looked_back_to: datetime | None = None
    """Where the search paused although the page is not full."""


# --- the question ----------------------------------------------------------------------------------------------------
def read(values: Mapping[str, str], user: User) -> Asked:
    """The filters among `values`, for what this person sees. At most three queries."""
    problems: dict[str, str] = {}
    text = {name: values.get(name, "").replace("\0", "").strip()[:200] for name in FIELDS}
    projects, missing = _projects(text["project"], user, problems)
    key, of_project = _key(text["key"], user, problems) if text["key"] else (None, None)
    if of_project is not None:  # all that a key asked for is in its project's lane
        projects = (of_project,) if projects is None or of_project in projects else ()
    if text["result"] and text["result"] not in RESULTS:
        problems["result"] = f"{text['result'][:40]} is no result. Say {', '.join(RESULTS)}."
    since, until = (_moment(name, text[name], problems) for name in ("since", "until"))
    if since is not None and until is not None and since >= until:
        problems["until"] = "It lies before since; swap them."
    wanted = Wanted(
        projects=projects,
        key=key,
        model=text["model"],
        result="" if "result" in problems else text["result"],
        code=text["code"],
        since=since,
        until=until,
    )
    return Asked(wanted, problems, missing=missing or (key is None and "key" in problems and text["key"].isdecimal()))


def _projects(text: str, user: User, problems: dict[str, str]) -> tuple[tuple[int, ...] | None, bool]:
    visible = Project.objects.visible_to(user)
    if text:
        number = _number(text)
        if number is None:
            problems["project"] = f"{text[:40]} is not the number of a project."
        elif visible.filter(pk=number).exists():
            return (number,), False
        else:
            problems["project"] = f"There is no project {number} that you can see."
            return (), True
    if user.is_operator:
        return None, False
    return tuple(visible.order_by("pk").values_list("pk", flat=True)[:MOST_PROJECTS]), False


def _key(text: str, user: User, problems: dict[str, str]) -> tuple[int | None, int | None]:
    """By number, or by what is seen of it; no more than that is looked at, should somebody paste all of it. With its
    project."""
    keys = Key.objects.visible_to(user)
    number = _number(text)
    shown = text.rstrip("…")[:PREFIX_LENGTH]
    found = keys.filter(pk=number) if number is not None else keys.filter(prefix__startswith=shown)
    some = list(found.order_by("pk").values_list("pk", "project")[:2])
    if len(some) == 1:
        return some[0]
    if some:
        problems["key"] = f"Several keys begin with {shown}; type more of it, or the key's number."
    else:
        problems["key"] = f"There is no key {shown} that you can see."
    return None, None


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def _moment(name: str, text: str, problems: dict[str, str]) -> datetime | None:
    """ISO 8601; without an offset it is UTC."""
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
        # Near the ends of the calendar an offset leads beyond it.
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        problems[name] = f"{text[:40]} is not a time such as 2026-01-31T12:00."
        return None


# --- the answer ------------------------------------------------------------------------------------------------------
def find(wanted: Wanted, *, before: str = "", size: int = PAGE) -> Found:
    """Newest first, from the cursor on. At most four queries, however many rows there are."""
    cursor, floor = read_cursor(before), None
    if wanted.key is not None or wanted.model:
        end = _newest_end(wanted, cursor)
        if end is None:
            return Found((), "")
        wanted = replace(wanted, until=end if wanted.until is None else min(wanted.until, end))
    lanes, rest = _lanes(wanted)
    if rest and lanes:
        floor = _deepest([_between(lane, wanted, cursor) for lane in lanes], LOOKED_THROUGH // len(lanes))
        lanes = [lane.filter(rest) for lane in lanes]
    places = _newest([_between(lane, wanted, cursor, floor) for lane in lanes], size + 1)
    rows = _rows([pk for _, pk in places[:size]])
    if len(places) > size:
        return Found(rows, write_cursor(*places[size - 1]))
    if floor is not None:
        return Found(rows, write_cursor(*floor), looked_back_to=floor[0])
    return Found(rows, "")


def of_key(key: Key, count: int = 20) -> tuple[Usage, ...]:
    """Its latest requests, at most so many, as far back as one page looks."""
    return find(Wanted(projects=(key.project_id,), key=key.pk), size=count).rows


def by_id(user: User, text: str) -> tuple[Usage, ...]:
    """Requests whose id is, or begins with, this text; those that this person sees. At most three queries."""
    text = text.strip()[:64]
    if not text or not text.isascii() or not text.isprintable():
        return ()
    # A range and not LIKE, which SQLite answers by reading everything. Ids are hexadecimal: none goes on with z.
    alike = Usage.objects.filter(request_id__gte=text, request_id__lt=text + "z").order_by("request_id")
    found = list(alike.values_list("pk", "project", "request_id")[:LIKE_AN_ID])
    if not user.is_operator:
        own = set(Project.objects.visible_to(user).values_list("pk", flat=True)[:MOST_PROJECTS])
        found = [each for each in found if each[1] in own]
    return _rows([pk for pk, _, name in found if name.startswith(text)][:FOUND_BY_ID])


def _lanes(wanted: Wanted) -> tuple[list[QuerySet[Usage]], Q]:
    """Where to look, each in the order of an index, and what must still be true of the rows there."""
    rows, rest = Usage.objects.all(), Q()
    lanes: list[QuerySet[Usage]] = [rows]
    if wanted.projects is not None and len(wanted.projects) <= MOST_LANES:
        lanes = [rows.filter(project=project) for project in wanted.projects]
    elif wanted.projects is not None:
        rest &= Q(project__in=wanted.projects)
    if wanted.key is not None:
        rest &= Q(key=wanted.key)
    if wanted.model:
        rest &= Q(model=wanted.model)
    if wanted.result:
        first, end = RESULTS[wanted.result]
        rest &= Q(status__gte=first, status__lt=end)
    if wanted.code:
        rest &= Q(error_code=wanted.code)
    return lanes, rest


def _newest_end(wanted: Wanted, cursor: Cursor | None) -> datetime | None:
    """Where the newest quarter of an hour ends that has such requests by its sums; None when there is none."""
    sums = UsageSlot.objects.all()
    if wanted.key is not None:
        sums = sums.filter(key=wanted.key)
    if wanted.model:
        sums = sums.filter(model=wanted.model)
    if wanted.projects is not None and wanted.key is None:
        sums = sums.filter(project__in=wanted.projects)
    if cursor is not None:
        sums = sums.filter(at__lte=cursor[0])
    if wanted.until is not None:
        sums = sums.filter(at__lt=wanted.until)
    newest = sums.order_by("-at").values_list("at", flat=True).first()
    return None if newest is None else newest + QUARTER


def _between(
    lane: QuerySet[Usage], wanted: Wanted, cursor: Cursor | None, floor: Cursor | None = None
) -> QuerySet[Usage]:
    """Below the cursor and down to the floor, with a single bound of time at each end: given two, SQLite reads from
    whichever it likes."""
    if cursor is not None and (wanted.until is None or cursor[0] < wanted.until):
        at, pk = cursor
        lane = lane.filter(Q(at__lt=at) | Q(at=at, pk__lt=pk), at__lte=at)
    elif wanted.until is not None:
        lane = lane.filter(at__lt=wanted.until)
    if floor is not None:
        at, pk = floor
        return lane.filter(Q(at__gt=at) | Q(at=at, pk__gte=pk), at__gte=at)
    return lane.filter(at__gte=wanted.since) if wanted.since is not None else lane


def _deepest(lanes: Sequence[QuerySet[Usage]], depth: int) -> Cursor | None:
    """The newest of the places that lie `depth` rows down each lane; None when every lane ends before."""
    found = _merged([lane.order_by("-at", "-pk").values_list("at", "id")[depth : depth + 1] for lane in lanes], 1)
    return found[0] if found else None


def _newest(lanes: Sequence[QuerySet[Usage]], count: int) -> list[Cursor]:
    return _merged([lane.order_by("-at", "-pk").values_list("at", "id")[:count] for lane in lanes], count)


def _merged(parts: Sequence[QuerySet[Usage, Cursor]], count: int) -> list[Cursor]:
    """One query for all lanes. Written out, since the ORM has no union of limited parts that SQLite takes."""
    if len(parts) <= 1:
        return list(parts[0]) if parts else []
    statements, values = [], list[object]()
    for part in parts:
        statement, own = part.query.sql_with_params()
        statements.append(f"SELECT * FROM ({statement}) AS lane")  # noqa: S608  what the ORM wrote, with placeholders
        values += own
    whole = f"{' UNION ALL '.join(statements)} ORDER BY 1 DESC, 2 DESC LIMIT {count:d}"
    return [(row.at, row.pk) for row in Usage.objects.raw(whole, values)]


def _rows(pks: Sequence[int]) -> tuple[Usage, ...]:
    """By number alone: joined with who may see them, they would be found by reading all of a person's projects."""
    rows = Usage.objects.filter(pk__in=pks).select_related("project", "key").defer("explained")
    return tuple(rows.order_by("-at", "-pk"))
