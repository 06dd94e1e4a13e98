/** Construction of all elements of the page: strings become text nodes, never markup. */

export const byId = (id) => document.getElementById(id);

/** `element("p", {class: "note", text: "…"}, child, …)`; attributes that are false or null are left out. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false) continue;
    if (name === "text") made.textContent = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** Returns whether a key belongs to an input method. In Safari, the Enter that confirms a composition has only the code. */
export const isComposing = (event) => event.isComposing || event.keyCode === 229;

/** Sets the text of a node; the same text is left, so that screen readers do not announce it again. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Makes the roots of `rows` the children of `list`. Rows in place are not moved, because they would lose the keyboard focus. */
export function keepRows(list, rows) {
  const roots = Array.from(rows, ({ root }) => root);
  const kept = new Set(roots);
  for (const child of [...list.children]) if (!kept.has(child)) child.remove();
  roots.forEach((root, place) => { if (list.children[place] !== root) list.insertBefore(root, list.children[place] ?? null); });
}

/** A button of type "button" that calls `action`. */
export function button(label, action, attributes = {}) {
  const made = element("button", { type: "button", text: label, ...attributes });
  made.addEventListener("click", action);
  return made;
}

/** Copies `text` and confirms it on the button. Without the clipboard API (plain HTTP) it uses a selection. */
export async function copy(text, source) {
  source.dataset.label ??= source.textContent; // which a second click finds changed
  source.textContent = (await copied(text)) ? "Copied" : "Not copied";
  byId("status").textContent = `${source.textContent}.`; // the button's accessible name stays
  setTimeout(() => { source.textContent = source.dataset.label; }, 1200);
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = element("textarea", { class: "sr", readonly: true });
    area.value = text;
    document.body.append(area);
    const focused = document.activeElement;
    area.focus();
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    focused.focus();
    return done;
  }
}
