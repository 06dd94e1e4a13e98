/** Setup of the page: views, models, chat, live view, commands. */

import { Chat } from "/static/chat.js";
import { commandsOf } from "/static/commands.js";
import { Confirmation } from "/static/confirm.js";
import { byId } from "/static/dom.js";
import { listenToKeys } from "/static/keys.js";
import { LiveView } from "/static/live.js";
import { ModelPicker } from "/static/modelpicker.js";
import { Models } from "/static/models.js";
import { ModelsView } from "/static/modelsview.js";
import { Palette } from "/static/palette.js";
import { PresetChoice } from "/static/presetchoice.js";
import { Prompts } from "/static/prompts.js";
import { Pulls } from "/static/pulls.js";
import { PullView } from "/static/pullview.js";
import { SettingsForm } from "/static/settings.js";

const confirmation = new Confirmation();
const settings = new SettingsForm(() => {
  live.wake({ otherKey: true });
  prompts.wake({ otherKey: true });
  findModels();
}, confirmation);
const key = () => settings.key;
const presets = new PresetChoice(settings, confirmation);
const models = new Models(key);
const pulls = new Pulls(key);
new ModelPicker(models, key);
const modelsView = new ModelsView(models, pulls, key, confirmation);
new PullView(byId("pull-progress"), pulls, { use: (name) => modelsView.use(name) });
const live = new LiveView(key, models);
const prompts = new Prompts(key);
const chat = new Chat(settings, { model: () => models.name(), modelNow: () => models.chosen?.id ?? "", refreshModels: () => models.refresh(), openSettings, showRequest }, confirmation);
models.listen((isOther) => {
  if (!isOther) return;
  settings.showDefaults(models.sampling);
  live.wake({ otherModel: true });
});
listenToKeys(new Palette(() => commandsOf({ chat, models, presets, show, openSettings })));

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
const findModels = () => models.find().catch(() => {});

for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => show(button.dataset.view));
}
// On narrow screens, the message field is shown only with the chat.
document.querySelector(".skip").addEventListener("click", () => { if (!byId("prompt").checkVisibility()) show("chat"); });
wide.addEventListener("change", () => show(document.body.dataset.view));
show("chat");
// Without a mouse, focus would open the on-screen keyboard.
if (matchMedia("(hover: hover)").matches) byId("prompt").focus();
findModels();
