/** The commands of the palette, as far as they apply at the moment. */

import { byId } from "/static/dom.js";
import { MODIFIER, showShortcuts } from "/static/keys.js";

const VIEWS = { chat: "chat", live: "live view of the block pool", requests: "last requests", models: "models", settings: "settings" };
const COLOURS = { auto: "as the system", light: "light", dark: "dark" };

/** `page`: {chat, models, presets, show(view), openSettings(name of a field)}. */
export function commandsOf({ chat, models, presets, show, openSettings }) {
  const toChat = (action) => () => {
    show("chat");
    action();
  };
  return [
    { title: "New chat", run: toChat(() => chat.startNew()) },
    ...(chat.isRunning ? [{ title: "Stop the answer", keys: "Esc", run: () => chat.stop() }] : []),
    ...(chat.isEmpty ? [] : [
      { title: "Export this chat", detail: "as Markdown", run: () => chat.exportAs("md") },
      { title: "Export this chat", detail: "as JSON", run: () => chat.exportAs("json") },
    ]),
    ...models.all.filter(({ id }) => id !== models.chosen?.id).map(({ id }) => ({ title: "Use model", detail: id, run: () => models.choose(id) })),
    ...(models.changes.allowed ? [{ title: "Add a model", run: () => {
      show("models");
      byId("pull-name").focus();
    } }] : []),
    ...Object.entries(VIEWS).map(([view, name]) => ({ title: "Show", detail: name, run: () => show(view) })),
    ...presets.all.map(({ name }) => ({ title: "Use preset", detail: name, run: () => presets.use(name) })),
    { title: "Edit the system prompt", run: () => openSettings("system") },
    ...Object.entries(COLOURS).map(([name, words]) => ({ title: "Colours", detail: words, run: () => document.dispatchEvent(new CustomEvent("themechoice", { detail: name })) })),
    { title: "Keyboard shortcuts", keys: `${MODIFIER} /`, run: showShortcuts },
    ...chat.others.map(({ id, title }) => ({ title: "Open chat", detail: title || "(no title)", run: toChat(() => chat.open(id)) })),
  ];
}
