/** Keyboard shortcuts of the whole page, and their help. */

import { setUpDialog, showDialog } from "/static/dialog.js";
import { byId, isComposing } from "/static/dom.js";

/** The modifier key of shortcuts on this machine, as people call it. */
export const MODIFIER = /Mac|iPhone|iPad/.test(navigator.platform) ? "⌘" : "Ctrl";

/** Shows the help. */
export const showShortcuts = () => showDialog(byId("shortcuts"));

/** Listens to the shortcuts. `palette`: a Palette. */
export function listenToKeys(palette) {
  setUpDialog(byId("shortcuts"));
  for (const place of document.querySelectorAll(".modifier")) place.textContent = MODIFIER;
  byId("commands").title = `Commands (${MODIFIER} K)`;
  byId("commands").addEventListener("click", () => palette.toggle());
  const actions = { k: () => palette.toggle(), "/": showShortcuts };
  document.addEventListener("keydown", (event) => {
    const action = actions[event.key.toLowerCase()];
    if (action === undefined || !(event.ctrlKey || event.metaKey) || event.altKey || isComposing(event)) return;
    if (event.shiftKey && event.key !== "/") return; // many keyboards have the slash on Shift+7
    event.preventDefault(); // the browser's own use of these keys
    action();
  });
}
