/** Modal dialogs: closed by Escape, by a click outside, and by their buttons with `data-close`. */

/** Sets up a dialog of the page. Its content must fill it. */
export function setUpDialog(dialog) {
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  for (const one of dialog.querySelectorAll("[data-close]")) one.addEventListener("click", () => dialog.close());
  return dialog;
}

export const isDialogOpen = () => document.querySelector("dialog[open]") !== null;

/** Shows a dialog, unless another one is open; returns whether it did. */
export function showDialog(dialog) {
  if (isDialogOpen()) return false;
  dialog.showModal();
  return true;
}
