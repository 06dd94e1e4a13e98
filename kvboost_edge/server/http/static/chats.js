/** Chats kept in this browser, each under a key of its own, so that two tabs do not overwrite each other. */

const PREFIX = "chat:";
const TITLE_LENGTH = 48;
const MOST_CHATS = 100;

/** The kept chats, the latest first: [{id, title, changed, turns}]. Without storage there are none. */
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

/** Keeps a chat; evicts the oldest others where there are too many or the browser has no room. Returns whether it is kept. */
export function keepChat(id, turns) {
  const title = turns[0].question.trim().replace(/\s+/g, " ").slice(0, TITLE_LENGTH);
  const text = JSON.stringify({ title, changed: Date.now(), turns });
  const others = keptChats().filter((chat) => chat.id !== id);
  for (const chat of others.splice(MOST_CHATS - 1)) removeChat(chat.id);
  for (;;) {
    try {
      localStorage.setItem(PREFIX + id, text);
      return true;
    } catch {
      if (others.length === 0) return false;
      removeChat(others.pop().id);
    }
  }
}

export function removeChat(id) {
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // storage is blocked: nothing is kept
  }
}

/** A chat as it was kept, or null for anything else. An answer that was under way then was stopped. */
function parsed(text) {
  try {
    const { title, changed, turns } = JSON.parse(text);
    for (const turn of turns) {
      for (const step of turn.steps) if (step.state === "running") step.state = "stopped";
    }
    return turns.length > 0 ? { title: String(title), changed: Number(changed), turns } : null;
  } catch {
    return null;
  }
}
