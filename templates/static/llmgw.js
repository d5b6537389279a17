// Theme switch, copy buttons, and the manners of live fragments. Pages read and work without it.
(() => {
  const root = document.documentElement;

  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.matches("[data-theme-switch]")) {
      root.dataset.theme = dark() ? "light" : "dark";
      try { localStorage.setItem("adminTheme", JSON.stringify(root.dataset.theme)); } catch { /* lasts for this page */ }
    }
    if (button.matches("[data-copy]")) {
      const source = button.parentElement.querySelector("code");
      let copied = false;
      try {
        await navigator.clipboard.writeText(source.textContent);
        copied = true;
      } catch {
        const range = document.createRange();
        range.selectNodeContents(source);
        getSelection().removeAllRanges();
        getSelection().addRange(range);
        copied = document.execCommand("copy");
      }
      button.textContent = copied ? "Copied" : "Press Ctrl-C";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    }
  });

  // A second click while the first is on its way would make a second key, whose answer hides the first one's.
  document.addEventListener("submit", (event) => {
    if (event.target.method !== "post") return;
    if (event.target.dataset.sent) event.preventDefault();
    event.target.dataset.sent = "1";
  });
  addEventListener("pageshow", () => document.querySelectorAll("form[data-sent]").forEach((form) => { delete form.dataset.sent; }));

  // A live fragment rests while nobody looks, while somebody reads an opened part of it or is in it by keyboard.
  const rests = (live) => document.hidden || live.querySelector("details[open]") || live.contains(document.activeElement);
  document.addEventListener("htmx:beforeRequest", (event) => {
    const live = event.detail.elt.closest("[data-live]");
    if (live && rests(live)) event.preventDefault();
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && window.htmx) document.querySelectorAll("[data-live]").forEach((live) => htmx.trigger(live, "look"));
  });
  for (const failed of ["htmx:sendError", "htmx:responseError", "htmx:timeout"]) {
    document.addEventListener(failed, () => root.classList.add("stale"));
  }
  document.addEventListener("htmx:afterSwap", () => root.classList.remove("stale"));
})();
