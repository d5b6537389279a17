"""Forms of the catalog's pages: a model and its profiles as fields, to and from the document that YAML and API use."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from django import forms

from catalog import document, spec
from catalog.document import METRICS, Document
from catalog.spec import Problem

MAX_PROFILES = 30
"""More do not fit into one form; such a model is edited as YAML."""
MAX_TEXT = 200_000
_FIELDS = {
    "scaling.min": "least",
    "scaling.max": "most",
    "scaling.idle_timeout": "idle_timeout",
    "slo.ttft_p99": "ttft_p99",
    "slo.tpot_p99": "tpot_p99",
    "external.url": "external_url",
    "external.model": "external_model",
    "external.api_key_file": "external_key_file",
}
"""Where a place of the document has another name in the form."""
_PLAIN = ("name", "source", "routing_profile", "band", "required_memory_gb", "team")
_PROFILE_PLAIN = (
    *("name", "engine", "gpu_class", "tp", "pp", "nodes", "gpus_per_node", "weight", "priority", "startup_timeout"),
    *("reserved_cores", "required_memory_gb", "launch_mode", "capacity_class", "max_loaded_adapters", "min_disk_gb"),
)


def _line(label: str, help_text: str = "", *, limit: int = 1000, placeholder: str = "") -> forms.CharField:
    widget = forms.TextInput({"autocomplete": "off", "spellcheck": "false", "placeholder": placeholder})
    return forms.CharField(
        label=label, help_text=help_text, required=False, strip=False, max_length=limit, widget=widget
    )


def _lines(label: str, help_text: str, *, rows: int = 2) -> forms.CharField:
    widget = forms.Textarea({"rows": rows, "spellcheck": "false"})
    return forms.CharField(
        label=label, help_text=help_text, required=False, strip=False, max_length=MAX_TEXT, widget=widget
    )


def _whole(label: str, help_text: str = "", *, placeholder: str = "") -> forms.IntegerField:
    widget = forms.NumberInput({"placeholder": placeholder})
    return forms.IntegerField(
        label=label,
        help_text=help_text,
        required=False,
        min_value=-(2**31) + 1,
        max_value=2**31 - 1,
        widget=widget,
    )


def _number(label: str, help_text: str = "") -> forms.FloatField:
    return forms.FloatField(label=label, help_text=help_text, required=False, widget=forms.NumberInput({"step": "any"}))


def _choice(label: str, words: Sequence[str], help_text: str = "") -> forms.ChoiceField:
    return forms.ChoiceField(
        label=label, choices=[(word, word) for word in words], initial=words[0], help_text=help_text
    )


class ModelForm(forms.Form):
    name = _line("Name", "What clients ask for.", limit=200)
    source = _line(
        "Source", "A file's path on nodes, an address, or an id such as org/name.", placeholder="/models/m.gguf"
    )
    aliases = _lines("Aliases", "Other names for it, one a line.")
    least = _whole("Kept up", "Replicas that always run.", placeholder="0")
    most = _whole("At most", "Empty: as many as are kept up. More than 0 with none kept up: started on demand.")
    idle_timeout = _line("Stopped after", "Of rest, where it is started on demand.", placeholder="15m")
    fallbacks = _lines("Fallbacks", "Models or aliases that serve when this one cannot, one a line, in order.")
    routing_profile = _choice("Routing", spec.ROUTING_PROFILES)
    band = _line("Priority band", "Where its requests wait, unless a limit says another.", limit=20)
    ttft_p99 = _line("First token within", "For 99 of 100 requests.", placeholder="2s")
    tpot_p99 = _line("Each further token within", "For 99 of 100 requests.", placeholder="50ms")
    required_memory_gb = _number("Memory in GB", "Of one replica; of its cards, or on CPUs of the node.")
    team = _line("Team", "Short name of the team whose quota of cards it counts against.", limit=80)
    external_url = _line("Address", "What stands before /chat/completions.", placeholder="https://provider.example/v1")
    external_model = _line("Its name there", limit=200)
    external_key_file = _line("File with the key", "On the gateways, an absolute path; read for each request.")

    def document(self, profiles: Sequence[Document], adapters: Sequence[Document]) -> Document:
        """What was entered, as YAML would have it. Call when valid."""
        held = self.cleaned_data
        found = {key: held[key] for key in _PLAIN if held[key] not in (None, "")}
        scaling = {"min": held["least"], "max": held["most"], "idle_timeout": held["idle_timeout"] or None}
        slo = {"ttft_p99": held["ttft_p99"] or None, "tpot_p99": held["tpot_p99"] or None}
        found |= {"name": held["name"], "scaling": scaling, "slo": slo}
        found |= {key: _split_lines(held[key]) for key in ("aliases", "fallbacks")}
        outside = {
            "url": held["external_url"],
            "model": held["external_model"],
            "api_key_file": held["external_key_file"] or None,
        }
        if any(outside.values()):
            found["external"] = outside
        return {**found, "profiles": list(profiles), "adapters": list(adapters)}


class ProfileForm(forms.Form):
    name = _line("Name", limit=80, placeholder="cpu")
    engine = _choice("Engine", spec.ENGINES)
    gpu_class = _line("GPU class", "Empty: on CPUs (llamacpp only).", limit=40, placeholder="h100-80g")
    tp = _whole("Tensor parallel", placeholder="1")
    nodes = _whole("Nodes", placeholder="1")
    weight = _whole("Requests at once", "That one replica serves.", placeholder="1")
    priority = _whole("Priority", "The highest that fits is placed.", placeholder="0")
    args = _lines("Arguments", "As on a command line; a word with blanks in quotes.", rows=3)
    env = _lines("Environment", "NAME=value, as on a command line.")
    pp = _whole("Pipeline parallel", placeholder="1")
    gpus_per_node = _whole("GPUs a node", "Empty: tensor parallel divided by nodes.")
    startup_timeout = _line("May start for", placeholder="20m")
    reserved_cores = _number("Cores kept free")
    required_memory_gb = _number("Memory in GB", "Empty: as the model says.")
    min_disk_gb = _number("Free disk in GB", "That a node needs to get a replica.")
    launch_mode = _choice("Ranks are started by", spec.LAUNCH_MODES)
    capacity_class = forms.ChoiceField(
        label="Capacity class", choices=[(word, word) for word in spec.CAPACITY_CLASSES], initial="standard"
    )
    max_loaded_adapters = _whole("Adapters at once", "Loaded when asked for. Empty: all, from the start.")
    labels = _lines("Labels of its nodes", "NAME=value, as on a command line.")
    only_nodes = _lines("Only on these nodes", "Names, one a line. Empty: any.")
    metrics_running = _line("Metric of running requests", "Empty: those known for the engine.")
    metrics_waiting = _line("Metric of waiting requests")
    metrics_kv_used = _line("Metric of used KV cache")

    MAIN = ("name", "engine", "gpu_class", "tp", "nodes", "weight", "priority")

    def main(self) -> list[forms.BoundField]:
        return [self[name] for name in self.MAIN]

    def rest(self) -> list[forms.BoundField]:
        return [field for field in self.visible_fields() if field.name not in (*self.MAIN, "args", "DELETE")]

    def is_open(self) -> bool:
        """Whether what is seldom needed has something to look at."""
        return any(field.errors or field.name in (self.initial or {}) for field in self.rest())

    def document(self) -> Document:
        held = self.cleaned_data
        found: Document = {key: held[key] for key in _PROFILE_PLAIN if held[key] not in (None, "")}
        found["args"] = held["args"]
        found |= {key: held[key] for key in ("env", "labels")}
        found["only_nodes"] = _split_lines(held["only_nodes"])
        found["metrics"] = {key: held[f"metrics_{key}"].split() for key in METRICS if held[f"metrics_{key}"].split()}
        return found

    def clean_args(self) -> list[str]:
        return _words(self.cleaned_data["args"])

    def clean_env(self) -> dict[str, str]:
        return _pairs(self.cleaned_data["env"])

    def clean_labels(self) -> dict[str, str]:
        return _pairs(self.cleaned_data["labels"])


class Profiles(forms.BaseFormSet):  # type: ignore[type-arg]  # it has no subscript as the program runs
    def documents(self) -> list[Document]:
        """Of every profile that is filled in and stays. Call when valid."""
        return [form.document() for form in self.kept()]

    def kept(self) -> list[ProfileForm]:
        gone = self.deleted_forms
        return [form for form in self.forms if form not in gone and (form.has_changed() or form in self.initial_forms)]


_ProfileFormSet = forms.formset_factory(
    ProfileForm,
    formset=Profiles,
    extra=1,
    can_delete=True,
    max_num=MAX_PROFILES,
    validate_max=True,
    absolute_max=MAX_PROFILES + 1,
)


def profile_forms(sent: Any, profiles: Sequence[spec.Profile]) -> Profiles:
    """A form for each of `profiles` and an empty one."""
    made = _ProfileFormSet(sent, initial=[profile_initial(each) for each in profiles], prefix="profiles")
    assert isinstance(made, Profiles)
    return made


class AdapterForm(forms.Form):
    name = _line("Name", "What clients ask for.", limit=200)
    source = _line("Source", "GGUF file for llama.cpp, PEFT directory for vLLM and SGLang; a path on nodes.")


class TextForm(forms.Form):
    text = forms.CharField(
        label="The catalog as YAML",
        strip=False,
        widget=forms.Textarea({"rows": 30, "spellcheck": "false", "class": "text", "wrap": "off"}),
    )
    note = forms.CharField(label="Why", required=False, max_length=200, help_text="Kept with the version.")

    def clean_text(self) -> str:
        return str(self.cleaned_data["text"]).replace("\r\n", "\n")


# --- from a model to fields ------------------------------------------------------------------------------------------
def model_initial(model: spec.Model) -> dict[str, Any]:
    held = document.write_model(model)
    found = {key: held[key] for key in _PLAIN if key in held}
    scaling, outside = held["scaling"], held.get("external", {})
    found |= {"least": scaling["min"], "most": scaling["max"], "idle_timeout": scaling.get("idle_timeout", "")}
    found |= {key: "\n".join(held.get(key, ())) for key in ("aliases", "fallbacks")}
    found |= held.get("slo", {})
    found |= {"external_url": outside.get("url", ""), "external_model": outside.get("model", "")}
    return {**found, "external_key_file": outside.get("api_key_file", "")}


def profile_initial(profile: spec.Profile) -> dict[str, Any]:
    """Only what is not its default, so that the form shows what is."""
    held = document.write_profile(profile)
    found = {key: held[key] for key in _PROFILE_PLAIN if key in held}
    if "args" in held:
        found["args"] = _command(held["args"])
    for key in ("env", "labels"):
        if key in held:
            found[key] = "\n".join(shlex.quote(f"{name}={value}") for name, value in held[key].items())
    if "only_nodes" in held:
        found["only_nodes"] = "\n".join(held["only_nodes"])
    for key in METRICS:
        if names := getattr(profile.metrics, key):
            found[f"metrics_{key}"] = " ".join(names)
    return found


def _command(args: Sequence[str]) -> str:
    """A flag begins a line, what belongs to it stands behind it."""
    text = ""
    for arg in args:
        text += (("\n" if arg.startswith("-") else " ") if text else "") + shlex.quote(arg)
    return text


# --- from fields to a document ---------------------------------------------------------------------------------------
def _split_lines(text: str) -> list[str]:
    return [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text.replace("\r\n", "\n"))
    except ValueError:
        raise forms.ValidationError("A quote is opened and not closed.") from None


def _pairs(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in _words(text):
        name, sign, value = word.partition("=")
        if not sign:
            raise forms.ValidationError(f"{word[:40]} has no =; write NAME=value.")
        if name in found:
            raise forms.ValidationError(f"{name[:40]} is set more than once; keep one.")
        found[name] = value
    return found


# --- problems to fields ----------------------------------------------------------------------------------------------
def show_problems(problems: Sequence[Problem], model: str, form: ModelForm, profiles: Sequence[ProfileForm]) -> None:
    """Each beside its field; those of other models, and of fields that the form has not, above it."""
    by_name: Mapping[str, ProfileForm] = {str(each.cleaned_data.get("name", "")): each for each in profiles}
    for problem in problems:
        target: forms.Form = form
        field = _FIELDS.get(problem.field, problem.field.replace(".", "_"))
        if problem.model == model and problem.profile in by_name and problem.profile:
            target = by_name[problem.profile]
        if problem.model == model and field in target.fields:
            target.add_error(field, problem.text)
        else:
            form.add_error(None, str(problem))
