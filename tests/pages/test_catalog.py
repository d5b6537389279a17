"""The catalog's pages: a model as a form, the whole as text, adapters, versions and the way back."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.http import QueryDict
from django.test import Client
from django.urls import reverse
from hypothesis import given, settings
from pytest_django import DjangoAssertNumQueries

from catalog import actions, adapter_files, document, forms, spec, yaml_io
from catalog.models import CatalogVersion, Model
from catalog.spec import Profile
from tenants.audit import SYSTEM
from tenants.models import AuditEntry, User
from tests.catalog.strategies import catalogs
from tests.pages import rows
from tests.stubs import tiny_gguf

CPU = Profile(name="cpu", engine="llamacpp", args=("--ctx-size", "8192", "--prompt", "say 'hi'"), env=(("A", "b c"),))
M = spec.Model(
    name="org/m",
    aliases=("chat", "two words"),
    source="/m/m.gguf",
    profiles=(CPU, Profile(name="big", gpu_class="h100-80g", tp=2, gpus_per_node=2, labels=(("zone", "a"),))),
    scaling=spec.scaling(1, 3, 60),
    fallbacks=("n",),
    slo=spec.Slo(2000, 50),
    adapters=(spec.Adapter("red", "/m/red.gguf"),),
)
N = spec.Model(name="n", source="/m/n.gguf", profiles=(CPU,))


def fields(model: spec.Model) -> dict[str, Any]:
    """What a browser sends back of the form as it was shown."""
    found: dict[str, Any] = {**forms.ModelForm.base_fields, **forms.model_initial(model)}
    for number in range(len(model.profiles) + 1):
        held = forms.profile_initial(model.profiles[number]) if number < len(model.profiles) else {}
        values = {**forms.ProfileForm.base_fields, **held}
        found |= {f"profiles-{number}-{key}": value for key, value in values.items()}
    found |= {"profiles-TOTAL_FORMS": len(model.profiles) + 1, "profiles-INITIAL_FORMS": len(model.profiles)}
    return {key: _shown(value) for key, value in found.items()}


def filled(model: spec.Model, **changes: Any) -> dict[str, Any]:
    return {**fields(model), "version": actions.current_version(), **changes}


def _shown(value: Any) -> str:
    value = getattr(value, "initial", value)
    return "" if value is None else str(value).replace("\n", "\r\n")


@settings(max_examples=30, deadline=None)
@given(catalogs())
def test_a_form_gives_back_the_model_it_was_made_from(models: tuple[spec.Model, ...]) -> None:
    for model in models:
        if any("\r" in text for each in model.profiles for text in (*each.args, *(value for _, value in each.env))):
            continue  # a browser sends every end of a line as one
        sent = QueryDict(mutable=True)
        sent.update(fields(model))
        form = forms.ModelForm(sent)
        profiles = forms.profile_forms(sent, model.profiles)
        assert form.is_valid(), form.errors
        assert profiles.is_valid(), profiles.errors
        adapters = document.write_model(model).get("adapters", [])
        read = document.read_model(form.document(profiles.documents(), adapters))
        assert read.problems == ()
        assert read.models == (model,)


@pytest.fixture
def root(client: Client, db: None) -> User:
    user = rows.make_operator()
    client.force_login(user)
    return user


@pytest.fixture
def stored(root: User) -> tuple[spec.Model, ...]:
    actions.apply_catalog(models=[M, N], actor=SYSTEM, note="first")
    return M, N


def saved(response: Any) -> str:
    """The page after a change that was taken."""
    assert response.status_code == 200
    assert response.redirect_chain, re.findall(r'errorlist.*?</ul>|class="error">.*?</li>', response.content.decode())
    return str(response.content.decode())


def not_saved(response: Any) -> str:
    assert response.status_code == 200
    return str(response.content.decode())


# --- a model ---------------------------------------------------------------------------------------------------------
def test_a_model_is_added_with_a_version_of_who_and_when(client: Client, root: User) -> None:
    sent = filled(spec.Model(name="org/new", source="/m/m.gguf", profiles=()), most="2")
    sent |= {"profiles-0-name": "cpu", "profiles-0-engine": "llamacpp", "profiles-0-args": "--ctx-size 4096"}
    page = saved(client.post("/catalog/add/", sent, follow=True))
    assert "org/new is saved." in page
    (model,) = Model.objects.snapshot()
    assert model.scaling == spec.Scaling(0, 2)
    assert model.profiles == (replace(CPU, args=("--ctx-size", "4096"), env=()),)
    version = CatalogVersion.objects.get()
    assert (version.number, version.made_by) == (1, "root")
    assert AuditEntry.objects.get(action="change catalog").via == "web"


def test_saving_a_form_as_it_was_shown_changes_nothing(client: Client, stored: Any) -> None:
    assert "Nothing changed." in saved(client.post("/catalog/edit/org/m/", filled(M), follow=True))
    assert Model.objects.snapshot() == stored
    assert CatalogVersion.objects.count() == 1


def test_scaling_profiles_and_the_name_are_edited_and_adapters_stay(client: Client, stored: Any) -> None:
    sent = filled(M, name="mm", aliases="org/m\r\nchat", least="0", most="", idle_timeout="5m")
    sent |= {"profiles-1-DELETE": "on", "profiles-0-weight": "8"}
    sent |= {"profiles-2-name": "small", "profiles-2-engine": "llamacpp", "profiles-2-min_disk_gb": "2.5"}
    saved(client.post("/catalog/edit/org/m/", sent, follow=True))
    model, _ = Model.objects.snapshot()
    assert (model.name, model.aliases, model.adapters) == ("mm", ("org/m", "chat"), M.adapters)
    assert model.scaling == spec.Scaling(0, 0, 300)
    assert model.profiles == (replace(CPU, weight=8), Profile(name="small", engine="llamacpp", min_disk_gb=2.5))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"most": "0"}, "max 0 is below min 1; raise max or lower min."),
        ({"source": ""}, "A source is missing"),
        ({"fallbacks": "gone"}, "No model or alias is named &#x27;gone&#x27;."),
        ({"name": "n"}, "n is already a model&#x27;s name"),
        ({"idle_timeout": "soon"}, "It must be a time such as 500ms"),
        ({"least": "many"}, "Enter a whole number."),
        ({"profiles-1-pp": "2"}, "nodes x gpus_per_node is 1 x 2 = 2, but tp x pp is 2 x 2 = 4"),
        ({"profiles-0-tp": "2"}, "llama.cpp has no parallel ranks; set tp to 1, not 2."),
        ({"profiles-0-args": "--api-key x"}, "--api-key is set by llmgw itself"),
        ({"profiles-0-args": "it's"}, "A quote is opened and not closed."),
        ({"profiles-0-env": "A"}, "A has no =; write NAME=value."),
        ({"profiles-0-env": "A=1 A=2"}, "A is set more than once; keep one."),
        ({"profiles-0-gpus_per_node": str(2**40)}, "less than or equal to"),
        ({"profiles-0-metrics_waiting": "a"}, "Name what counts running requests too"),
        ({"profiles-1-gpu_class": ""}, "vllm needs cards"),
        ({"profiles-2-engine": "llamacpp"}, "has no name; give it one"),
        ({"profiles-1-name": "CPU"}, "Another profile of this model has that name"),
        ({"profiles-0-DELETE": "on", "profiles-1-DELETE": "on"}, "It has no profile"),
        ({"external_url": "ftp://x", "external_model": "x"}, "Write an address such as"),
        ({"profiles-TOTAL_FORMS": "99999"}, "at most 30 forms"),
        ({"profiles-TOTAL_FORMS": "x"}, "ManagementForm data is missing"),
    ],
)
def test_a_refused_change_is_told_at_its_field_and_what_was_entered_stays(
    client: Client, stored: Any, changes: dict[str, str], says: str
) -> None:
    page = not_saved(client.post("/catalog/edit/org/m/", filled(M, **changes)))
    assert says in page
    assert "Not saved." in page
    assert Model.objects.snapshot() == stored
    assert CatalogVersion.objects.count() == 1


def test_adding_never_replaces_a_model_that_is_there(client: Client, stored: Any) -> None:
    page = not_saved(client.post("/catalog/add/", filled(replace(N, source="/m/other.gguf"))))
    assert "There is a model of that name already" in page
    assert Model.objects.snapshot() == stored


def test_a_form_that_was_overtaken_says_by_whom_and_saves_when_sent_again(client: Client, stored: Any) -> None:
    sent = filled(M, least="2")
    actions.put_model(model=replace(N, scaling=spec.scaling(1)), actor=SYSTEM)
    page = not_saved(client.post("/catalog/edit/org/m/", sent))
    assert "llmgw changed the catalog since, to version 2." in page
    assert 'name="version" value="2"' in page
    saved(client.post("/catalog/edit/org/m/", {**sent, "version": "2"}, follow=True))
    assert [model.scaling.min for model in Model.objects.snapshot()] == [2, 1]


def test_a_model_with_more_profiles_than_a_form_holds_is_edited_as_text(client: Client, root: User) -> None:
    profiles = tuple(replace(CPU, name=f"p{number}") for number in range(31))
    actions.put_model(model=replace(N, profiles=profiles), actor=SYSTEM)
    response = client.get("/catalog/edit/n/", follow=True)
    assert response.redirect_chain == [("/catalog/text/", 302)]
    assert "more profiles than fit into a form" in response.content.decode()


def test_a_model_is_removed_unless_others_fall_back_on_it(client: Client, stored: Any) -> None:
    assert "org/m names it as a fallback" in client.get("/catalog/remove/n/").content.decode()
    assert "No model or alias is named" in not_saved(client.post("/catalog/remove/n/"))
    assert "is out of the catalog" in saved(client.post("/catalog/remove/org/m/", follow=True))
    assert [model.name for model in Model.objects.snapshot()] == ["n"]
    assert client.get("/catalog/remove/org/m/").status_code == 404
    assert client.get("/catalog/edit/a%00b/").status_code == 404


# --- adapters --------------------------------------------------------------------------------------------------------
def test_an_adapter_is_added_after_its_file_was_read_and_removed(client: Client, root: User, tmp_path: Path) -> None:
    source = str(tiny_gguf.write_model(tmp_path / "tiny.gguf"))
    actions.put_model(model=replace(N, name="org/m", source=source), actor=SYSTEM)
    red = str(tiny_gguf.write_adapter(tmp_path / "red.gguf"))
    other = str(tiny_gguf.write_adapter(tmp_path / "other.gguf", architecture="qwen2"))
    url = reverse("catalog-adapters", args=["org/m"])
    assert "red is an adapter of org/m." in saved(client.post(url, {"name": "red", "source": red}, follow=True))
    page = not_saved(client.post(url, {"name": "blue", "source": other}))
    assert "It was made for qwen2, and the model is llama." in page
    assert f'value="{other}"' in page
    page = saved(client.post(url, {"name": "green", "source": "/only/on/nodes.gguf"}, follow=True))
    assert "was not read from here" in page
    saved(client.post(url, {"remove": "red"}, follow=True))
    assert [adapter.name for adapter in Model.objects.snapshot()[0].adapters] == ["green"]
    assert "There is no adapter" in not_saved(client.post(url, {"remove": "red"}))


# --- the whole -------------------------------------------------------------------------------------------------------
def test_the_whole_is_edited_as_text_checked_and_applied(client: Client, stored: Any) -> None:
    text = yaml_io.dump([M, N])
    page = client.get("/catalog/text/").content.decode()
    assert "name: org/m" in page
    sent = {"text": text.replace("max: 3", "max: 4").replace("\n", "\r\n"), "note": "more", "version": "1"}
    assert "This is a valid catalog." in not_saved(client.post("/catalog/text/", {**sent, "check": ""}))
    assert CatalogVersion.objects.count() == 1
    assert "changed: org/m" in saved(client.post("/catalog/text/", sent, follow=True))
    assert Model.objects.snapshot() == (replace(M, scaling=spec.scaling(1, 4, 60)), N)
    assert CatalogVersion.objects.get(number=2).note == "more"
    assert "to version 2" in not_saved(client.post("/catalog/text/", {**sent, "text": "models: []"}))
    assert len(Model.objects.snapshot()) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("models:\n- name: a\n  sorce: /a\n", "line 3, model a: sorce: The key sorce is unknown. Did you mean source?"),
        ("models: [", "This is not YAML"),
        ("models: []\nmodels: []", "It is written twice."),
        ("x" * (yaml_io.MAX_CHARACTERS + 1), "is the most."),
        ("", "This field is required."),
    ],
)
def test_a_text_that_is_no_catalog_is_told_by_its_lines_and_kept(
    client: Client, stored: Any, text: str, says: str
) -> None:
    page = not_saved(client.post("/catalog/text/", {"text": text, "version": "1"}))
    assert says in page
    assert text[:40].replace("&", "&amp;") in page
    assert Model.objects.snapshot() == stored


# --- versions --------------------------------------------------------------------------------------------------------
def test_versions_tell_who_and_why_and_are_gone_back_to(client: Client, stored: Any) -> None:
    actions.remove_model(name="org/m", actor=SYSTEM, note="enough")
    page = client.get("/catalog/versions/").content.decode()
    assert "enough" in page
    assert "llmgw" in page
    page = client.get("/catalog/versions/1/").content.decode()
    assert '<span class="come">+- name: org/m</span>' in page
    assert "The catalog is as in version 1 again." in saved(client.post("/catalog/versions/1/", follow=True))
    assert Model.objects.snapshot() == stored
    newest = CatalogVersion.objects.first()
    assert newest is not None
    assert (newest.number, newest.made_by, newest.note) == (3, "root", "roll back to version 1")
    assert "This is what the catalog is now." in client.get("/catalog/versions/3/").content.decode()


def test_a_version_that_breaks_a_rule_of_today_is_refused(client: Client, stored: Any) -> None:
    CatalogVersion.objects.filter(number=1).update(text="models: [{name: x}]")
    assert "line 1, model x: source" in not_saved(client.post("/catalog/versions/1/"))
    assert client.post("/catalog/versions/9/").status_code == 404
    assert client.get(f"/catalog/versions/{2**40}/").status_code == 404
    assert Model.objects.snapshot() == stored


def test_long_versions_are_not_compared_and_old_ones_are_on_the_next_page(client: Client, root: User) -> None:
    text = "\n" * 5000 + "models: []"
    CatalogVersion.objects.bulk_create(
        CatalogVersion(number=number, text=text, made_by="alice") for number in range(1, 104)
    )
    assert "Too long to compare here." in client.get("/catalog/versions/1/").content.decode()
    page = client.get("/catalog/versions/").content.decode()
    assert "?before=4" in page
    assert 'href="/catalog/versions/3/"' in client.get("/catalog/versions/?before=4").content.decode()
    assert client.get("/catalog/versions/?before=x").status_code == 200


def test_a_list_of_a_thousand_models_takes_as_many_queries_as_one_of_two(
    client: Client, root: User, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    rows.make_large_cluster(1000)
    with django_assert_num_queries(6):
        page = client.get("/catalog/").content.decode()
    assert "1,000 models" in page or "1000 models" in page
    assert page.count("<tr>") == 101
    last = client.get("/catalog/?from=900").content.decode()
    assert "model-0999" in last
    assert "Next 100" not in last
    assert "No model in the catalog from here on" in client.get("/catalog/?from=5000").content.decode()


@pytest.mark.django_db
def test_an_empty_catalog_leads_to_the_form(client: Client, root: User) -> None:
    assert 'href="/catalog/add/"' in client.get("/catalog/").content.decode()
    assert "was never changed" in client.get("/catalog/versions/").content.decode()
    assert client.get("/catalog/add/").status_code == 200


# --- in the admin ----------------------------------------------------------------------------------------------------
@pytest.fixture
def verified(client: Client, root: User) -> Client:
    """Root, who came with a second factor."""
    rows.sign_in_verified(client, root)
    return client


def test_a_model_is_edited_in_the_admin_under_the_same_rules(verified: Client, stored: Any) -> None:
    row = Model.objects.get(name="org/m")
    url = f"/admin/catalog/model/{row.pk}/change/"
    assert "name: org/m" in verified.get(url).content.decode()
    text = yaml_io.dump_model(M)
    for wrong, says in (
        (text.replace("max: 3", "max: 0"), "model org/m: scaling.max: max 0 is below min 1"),
        (text.replace("tp: 2", "tpp: 2"), "model org/m, profile big: tpp: The key tpp is unknown. Did you mean tp?"),
        (text.replace("name: org/m", "name: n"), "n is already a model&#x27;s name"),
        ("- a", "It must be a mapping with name"),
        ("{", "This is not YAML"),
    ):
        assert says in not_saved(verified.post(url, {"text": wrong}))
    assert Model.objects.snapshot() == stored
    renamed = text.replace("max: 3", "max: 4").replace("name: org/m", "name: mm").replace("\n", "\r\n")
    saved(verified.post(url, {"text": renamed}, follow=True))
    assert Model.objects.snapshot()[0] == replace(M, name="mm", scaling=spec.scaling(1, 4, 60))
    assert AuditEntry.objects.filter(action="change catalog", via="admin").exists()


def test_a_model_is_added_in_the_admin_and_never_over_another(verified: Client, stored: Any) -> None:
    text = yaml_io.dump_model(replace(N, name="new"))
    assert "new" in saved(verified.post("/admin/catalog/model/add/", {"text": text}, follow=True))
    assert [model.name for model in Model.objects.snapshot()] == ["org/m", "n", "new"]
    page = not_saved(verified.post("/admin/catalog/model/add/", {"text": text.replace("/m/n", "/m/x")}))
    assert "There is a model new already" in page
    assert verified.post(f"/admin/catalog/model/{Model.objects.get(name='n').pk}/delete/").status_code == 403


@pytest.mark.django_db(transaction=True)
def test_files_are_read_before_the_store_is_locked(
    verified: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A slow disk or server must not keep others from writing."""
    actions.apply_catalog(models=[N], actor=SYSTEM)
    locked: list[bool] = []
    look = adapter_files.look

    def noted(new: Any, old: Any) -> adapter_files.Looked:
        locked.append(connection.in_atomic_block)
        return look(new, old)

    monkeypatch.setattr(adapter_files, "look", noted)
    wished = replace(N, adapters=(spec.Adapter("red", str(tmp_path / "red.gguf")),))
    text = yaml_io.dump_model(wished)
    saved(verified.post(f"/admin/catalog/model/{Model.objects.get().pk}/change/", {"text": text}, follow=True))
    saved(verified.post("/admin/catalog/model/add/", {"text": yaml_io.dump_model(replace(N, name="b"))}, follow=True))
    saved(verified.post("/catalog/edit/n/", filled(wished), follow=True))
    told = document.write_model(wished)
    assert verified.put("/api/v1/models/n", told, content_type="application/json").status_code == 200
    assert locked
    assert not any(locked)


def test_every_surface_refuses_the_same_change_in_the_same_words(verified: Client, stored: Any) -> None:
    says = "model n, profile cpu: tp: llama.cpp has no parallel ranks; set tp to 1, not 2."
    wrong = replace(N, profiles=(replace(CPU, tp=2),))
    text = yaml_io.dump([M, wrong])
    url = f"/admin/catalog/model/{Model.objects.get(name='n').pk}/change/"
    api = [
        verified.put("/api/v1/catalog", text, content_type="application/yaml"),
        verified.put("/api/v1/catalog", document.write([M, wrong]), content_type="application/json"),
        verified.put("/api/v1/models/n", document.write_model(wrong), content_type="application/json"),
    ]
    told = [re.sub(r"^line \d+, ", "", answer.json()["error"]["message"]) for answer in api]
    assert told == [says] * 3
    for page in (
        verified.post("/catalog/text/", {"text": text, "version": "1"}),
        verified.post(url, {"text": yaml_io.dump_model(wrong)}),
    ):
        assert "profile cpu: tp: llama.cpp has no parallel ranks; set tp to 1, not 2." in not_saved(page)
    form = not_saved(verified.post("/catalog/edit/n/", filled(N, **{"profiles-0-tp": "2"})))
    assert "llama.cpp has no parallel ranks; set tp to 1, not 2." in form
    assert Model.objects.snapshot() == stored
