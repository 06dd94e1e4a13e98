/** Storage of the tab that never throws; if the browser refuses it, values live as long as the page. */

const fallback = new Map();

export function load(name) {
  try {
    return sessionStorage.getItem(name) ?? "";
  } catch {
    return fallback.get(name) ?? "";
  }
}

/** Keeps `value` until the tab is closed; an empty value is removed. */
export function save(name, value) {
  try {
    if (value === "") sessionStorage.removeItem(name);
    else sessionStorage.setItem(name, value);
  } catch {
    fallback.set(name, value);
  }
}
