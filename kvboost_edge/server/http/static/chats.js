/** Chats stored in this browser, each under its own key, so that tabs with different chats do not overwrite each other. */

import { settle } from "/static/conversation.js";
import { beginning } from "/static/format.js";

const PREFIX = "chat:";
const TITLE_LENGTH = 48;
const MAX_STORED_CHATS = 100;

/** The stored chats, latest first: [{id, title, changed, turns}]; empty without storage. */
export function keptChats() {
  const found = [];
  try {
    for (const key of Object.keys(localStorage)) {
      const chat = key.startsWith(PREFIX) ? parsed(localStorage.getItem(key)) : null;
      if (chat !== null) found.push({ ...chat, id: key.slice(PREFIX.length) });
    }
  } catch {
    return []; // storage is blocked
  }
  return found.sort((one, other) => other.changed - one.changed);
}

/** The id of the chat that is stored under `key`, or "". */
export const idOf = (key) => (key?.startsWith(PREFIX) ? key.slice(PREFIX.length) : "");

/** The title of a chat: the beginning of its first question. */
export const titleOf = (turns) => beginning(turns[0].question.trim().replace(/\s+/g, " "), TITLE_LENGTH);

/**
 * Stores a chat and returns whether that worked. Deletes the oldest others if there are too many or storage is full,
 * but not for a chat that does not fit without them either.
 */
export function keepChat(id, turns) {
  const text = JSON.stringify({ title: titleOf(turns), changed: Date.now(), turns });
  const others = keptChats().filter((chat) => chat.id !== id);
  for (const chat of others.splice(MAX_STORED_CHATS - 1)) removeChat(chat.id);
  const evicted = []; // [key, text]
  while (!stored(PREFIX + id, text)) {
    if (others.length === 0) {
      for (const [key, earlier] of evicted) stored(key, earlier);
      return false;
    }
    const key = PREFIX + others.pop().id;
    evicted.push([key, localStorage.getItem(key)]);
    localStorage.removeItem(key);
  }
  return true;
}

function stored(key, text) {
  try {
    localStorage.setItem(key, text);
    return true;
  } catch {
    return false; // storage is full or blocked
  }
}

export function removeChat(id) {
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // storage is blocked
  }
}

const isText = (value) => typeof value === "string";
const isTurn = ({ question, steps }) => isText(question) && steps.every(isStep);
const isStep = ({ reasoning, answer, calls, state }) => [reasoning, answer, state].every(isText) && calls.every(isCall);
const isCall = ({ id, name, arguments: text, result }) => [id, name, text, result ?? ""].every(isText);

/** A valid stored chat, or null. An answer that was running counts as stopped. */
function parsed(text) {
  try {
    const { title, changed, turns } = JSON.parse(text);
    for (const turn of turns) {
      for (const step of turn.steps) if (step.state === "running") step.state = "stopped";
      settle(turn);
    }
    return turns.length > 0 && turns.every(isTurn) ? { title: String(title), changed: Number(changed), turns } : null;
  } catch {
    return null;
  }
}
