/** The command palette: a field that finds commands, and their list. */

import { setUpDialog, showDialog } from "/static/dialog.js";
import { byId, element, isComposing, setText } from "/static/dom.js";
import { plural } from "/static/format.js";

const STEPS = { ArrowUp: -1, ArrowDown: 1, PageUp: -8, PageDown: 8 };

/** The commands, {title, detail, run}, that contain each word of `query`; those whose title begins with it first. */
export function found(commands, query) {
  const words = query.toLowerCase().split(/\s+/).filter((word) => word !== "");
  const textOf = ({ title, detail = "" }) => `${title} ${detail}`.toLowerCase();
  const matches = commands.filter((one) => words.every((word) => textOf(one).includes(word)));
  const begins = (one) => Number(words.length > 0 && textOf(one).startsWith(words.join(" ")));
  return matches.sort((one, other) => begins(other) - begins(one)); // stable
}

export class Palette {
  #commands;
  #all = []; // commands at the time of opening
  #shown = []; // those in the list
  #active = 0;
  #dialog = setUpDialog(byId("palette"));
  #field = byId("palette-field");
  #list = byId("palette-list");

  /** `commands()`: the present commands, [{title, detail, keys, run}]; `detail` and `keys` may be missing. */
  constructor(commands) {
    this.#commands = commands;
    this.#field.addEventListener("input", () => this.#find());
    this.#field.addEventListener("keydown", (event) => this.#pressed(event));
    // The field keeps the focus.
    this.#list.addEventListener("mousedown", (event) => event.preventDefault());
    this.#list.addEventListener("click", (event) => this.#run(this.#placeOf(event.target)));
    this.#list.addEventListener("mousemove", (event) => this.#activate(this.#placeOf(event.target), false));
  }

  /** Opens the palette, or closes it if it is open. */
  toggle() {
    if (this.#dialog.open) {
      this.#dialog.close();
      return;
    }
    if (!showDialog(this.#dialog)) return;
    this.#all = this.#commands();
    this.#field.value = "";
    this.#find();
  }

  #find() {
    this.#shown = found(this.#all, this.#field.value);
    this.#list.replaceChildren(...this.#shown.map(item));
    this.#list.hidden = this.#shown.length === 0; // an empty list box is an error
    this.#field.setAttribute("aria-expanded", String(this.#shown.length > 0));
    setText(byId("palette-count"), this.#shown.length === 0 ? "No command matches." : plural(this.#shown.length, "command"));
    byId("palette-count").classList.toggle("sr", this.#shown.length > 0);
    this.#active = 0;
    this.#activate(0);
  }

  #pressed(event) {
    if (isComposing(event) || this.#shown.length === 0) return;
    if (event.key in STEPS) {
      event.preventDefault();
      const step = STEPS[event.key];
      const last = this.#shown.length - 1;
      const wanted = this.#active + step;
      // Single steps go around, pages stop at the ends.
      if (Math.abs(step) > 1) this.#activate(Math.max(0, Math.min(last, wanted)));
      else this.#activate(wanted < 0 ? last : wanted > last ? 0 : wanted);
    } else if (event.key === "Enter") {
      event.preventDefault();
      this.#run(this.#active);
    }
  }

  #placeOf(target) {
    return [...this.#list.children].indexOf(target.closest("li"));
  }

  #activate(place, scrolls = true) {
    if (place < 0) return;
    this.#list.children[this.#active]?.setAttribute("aria-selected", "false");
    this.#active = place;
    const active = this.#list.children[place];
    if (active === undefined) {
      this.#field.removeAttribute("aria-activedescendant");
      return;
    }
    active.setAttribute("aria-selected", "true");
    this.#field.setAttribute("aria-activedescendant", active.id);
    if (scrolls) active.scrollIntoView({ block: "nearest" });
  }

  #run(place) {
    if (place < 0) return;
    this.#dialog.close(); // first, because it returns the focus
    this.#shown[place].run();
  }
}

function item({ title, detail = "", keys = "" }, place) {
  const made = element("li", { id: `command-${place}`, role: "option", "aria-selected": "false" }, element("span", { class: "command-title", text: title }));
  if (detail !== "") made.append(" ", element("span", { class: "command-detail", text: detail }));
  if (keys !== "") made.append(" ", element("kbd", { text: keys }));
  return made;
}
