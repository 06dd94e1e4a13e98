/** JSON as text: errors with their position, and the text with line breaks. */

const SPACE = /[ \t\n\r]*/y;
const TOKEN =
  /[{}[\]:,]|"[^"\\\u0000-\u001f]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\u0000-\u001f]*)*"|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null/y;
const CLOSES = { "{": "}", "[": "]" };
const DEEPEST = 40; // indented levels, limited so that a hostile text of brackets stays small

/** The value of `text` and "", or undefined and the error. */
export function readJson(text) {
  try {
    return { value: JSON.parse(text), error: "" };
  } catch {
    return { value: undefined, error: scan(text).error };
  }
}

/** `text` with a line for each name and item, numbers unchanged; null if it is not JSON. */
export function pretty(text) {
  const { tokens, error } = scan(text);
  if (error !== "") return null;
  const lines = [];
  let depth = 0;
  let before = "";
  for (const token of tokens) {
    const opened = before in CLOSES;
    const closes = token === "}" || token === "]";
    if (closes) depth -= 1;
    if (closes ? !opened : opened || before === ",") lines.push("\n", "  ".repeat(Math.min(depth, DEEPEST)));
    if (token in CLOSES) depth += 1;
    lines.push(shown(token));
    before = token;
  }
  return lines.join("");
}

function shown(token) {
  if (token === ":") return ": ";
  return token.startsWith('"') ? JSON.stringify(JSON.parse(token)) : token;
}

/** The tokens of `text` up to its first error, and the error, or "". */
export function scan(text) {
  const tokens = [];
  const open = [];
  let wanted = "a value";
  for (let at = 0; ; ) {
    SPACE.lastIndex = at;
    SPACE.test(text);
    TOKEN.lastIndex = SPACE.lastIndex;
    const token = TOKEN.exec(text)?.[0] ?? "";
    if (wanted === "the end" && SPACE.lastIndex === text.length) return { tokens, error: "" };
    const next = following(wanted, token, open);
    if (next === "") return { tokens, error: complaint(text, SPACE.lastIndex, wanted, open) };
    tokens.push(token);
    at = TOKEN.lastIndex;
    wanted = next;
  }
}

/** What is expected after `token`, or "" if `token` is not `wanted`. `open`: the open brackets, changed in place. */
function following(wanted, token, open) {
  const around = open.at(-1);
  if (token === "}" || token === "]") {
    if (CLOSES[around] !== token || !(wanted === "a comma" || wanted.endsWith(` or ${token}`))) return "";
    open.pop();
  } else if (token === ",") {
    if (wanted !== "a comma") return "";
    return around === "{" ? "a name in double quotes" : "a value";
  } else if (token === ":") {
    return wanted === "a colon" ? "a value" : "";
  } else if (wanted.startsWith("a name")) {
    return token.startsWith('"') ? "a colon" : "";
  } else if (token === "" || !wanted.startsWith("a value")) {
    return "";
  } else if (token in CLOSES) {
    open.push(token);
    return token === "{" ? "a name in double quotes or }" : "a value or ]";
  }
  return open.length === 0 ? "the end" : "a comma";
}

function complaint(text, at, wanted, open) {
  const before = text.slice(0, at).split("\n");
  const where = `line ${before.length}, column ${before.at(-1).length + 1}`;
  const expected = wanted === "a comma" ? `a comma or ${CLOSES[open.at(-1)]}` : wanted;
  if (at === text.length) return `${where}: the text ends, expected ${expected}.`;
  const found = /^(?:[\w.+-]+|.)/su.exec(text.slice(at, at + 24))[0];
  if (found === '"' && /^a (value|name)/.test(wanted)) return `${where}: a string that is unterminated, or contains a line break or an invalid escape.`;
  return `${where}: expected ${expected}, not ${found}.`;
}
