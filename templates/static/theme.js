// Runs before the page is painted. Shares its choice with the admin, which keeps it under the same name.
(() => {
  const root = document.documentElement;
  root.classList.add("js");
  let kept = "auto";
  try { kept = JSON.parse(localStorage.getItem("adminTheme")) || "auto"; } catch { /* no storage: follow the system */ }
  if (kept === "light" || kept === "dark") root.dataset.theme = kept;
})();
