/** Puts the page together: views, the model's name, chat, live view. */

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

// Where there is room, the chat is always shown, with the live view or the settings beside it.
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

/** Shows the settings with the keyboard in the field called `name`. */
function openSettings(name) {
  show("settings");
  byId(name).focus();
}

/** Shows what became of a request's prompt in the cache. */
function showRequest(id) {
  show("requests");
  prompts.open(id);
}

/** Asks for the models where nobody waits for a name: what went wrong stands in the header. */
const showModel = () => model.find().catch(() => {});

for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => show(button.dataset.view));
}
// Where one view is shown at a time, the message field is there only with the chat.
document.querySelector(".skip").addEventListener("click", () => { if (!byId("prompt").checkVisibility()) show("chat"); });
wide.addEventListener("change", () => show(document.body.dataset.view));
show("chat");
// Where there is no mouse, focus would open the keyboard over the page.
if (matchMedia("(hover: hover)").matches) byId("prompt").focus();
showModel();
