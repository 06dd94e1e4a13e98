/* Runs before the first paint, so that no page flashes in the wrong colours; hence not a module. */
"use strict";
(() => {
  const NAMES = ["auto", "light", "dark"];
  const LABELS = { auto: "as the system", light: "light", dark: "dark" };

  function stored() {
    try {
      const name = localStorage.getItem("theme");
      return NAMES.includes(name) ? name : "auto";
    } catch {
      return "auto"; // storage is blocked
    }
  }

  function apply(name) {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    const button = document.getElementById("theme");
    if (button !== null) {
      button.textContent = `◐ ${name[0].toUpperCase()}${name.slice(1)}`;
      button.setAttribute("aria-label", `Colours: ${LABELS[name]}`);
      button.title = "Change the colours";
    }
    document.dispatchEvent(new Event("themechange"));
  }

  let current = stored();
  apply(current);
  document.addEventListener("DOMContentLoaded", () => {
    apply(current);
    document.getElementById("theme").addEventListener("click", () => choose(NAMES[(NAMES.indexOf(current) + 1) % NAMES.length]));
  });
  // Modules choose colours with this event.
  document.addEventListener("themechoice", (event) => choose(event.detail));

  function choose(name) {
    current = name;
    try {
      localStorage.setItem("theme", name);
    } catch {
      // stored for this page only
    }
    apply(name);
  }
})();
