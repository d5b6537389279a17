// The admin's own script reads the system's theme once; an admin left open follows it into the evening.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (system) => {
  let kept = "auto";
  try { kept = JSON.parse(localStorage.getItem("adminTheme")) || "auto"; } catch { /* no storage: follow the system */ }
  if (kept === "auto") document.documentElement.classList.toggle("dark", system.matches);
});
