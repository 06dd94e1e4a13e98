/** Setup of the page: views, model, chat, live view. */

import { Chat } from "/static/chat.js";
import { byId } from "/static/dom.js";
import { LiveView } from "/static/live.js";
import { ModelChoice } from "/static/models.js";
import { Prompts } from "/static/prompts.js";
import { SettingsForm } from "/static/settings.js";

const settings = new SettingsForm(() => {
  live.wake({ otherKey: true });
  prompts.wake({ otherKey: true });
  showModel();
});
const model = new ModelChoice(() => settings.key, () => {
  settings.showDefaults(model.sampling);
  live.wake({ otherModel: true });
});
const live = new LiveView(() => settings.key, model);
const prompts = new Prompts(() => settings.key);
new Chat(settings, { model: () => model.name(), openSettings, showRequest });

// On wide screens, the chat is always shown, next to the live view or the settings.
const wide = matchMedia("(min-width: 900px)");

function show(view) {
  document.body.dataset.view = view;
  const shown = wide.matches && view === "chat" ? "live" : view;
  for (const button of document.querySelectorAll("nav button")) {
    button.setAttribute("aria-pressed", String(button.dataset.view === shown));
  }
  live.wake();
  prompts.wake();
}

/** Shows the settings and focuses the field `name`. */
function openSettings(name) {
  show("settings");
  byId(name).focus();
}

/** Shows the cache-miss report of a request. */
function showRequest(id) {
  show("requests");
  prompts.open(id);
}

/** Reads the models; the header shows an error. */
const showModel = () => model.find().catch(() => {});

for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => show(button.dataset.view));
}
// On narrow screens, the message field is shown only with the chat.
document.querySelector(".skip").addEventListener("click", () => { if (!byId("prompt").checkVisibility()) show("chat"); });
wide.addEventListener("change", () => show(document.body.dataset.view));
show("chat");
// Without a mouse, focus would open the on-screen keyboard.
if (matchMedia("(hover: hover)").matches) byId("prompt").focus();
showModel();
