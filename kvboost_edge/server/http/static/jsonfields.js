/** JSON settings: tools, and the schema of the answers. */

import { readJson } from "/static/jsontext.js";

export const JSON_FIELDS = [
  { name: "tools", label: "Tools", problem: problemOfTools },
  { name: "schema", label: "JSON schema", problem: (value) => (isObject(value) ? "" : "must be a JSON object.") },
];

/**
 * `raw`: field name -> text, including `tool_choice`. Returns `values`, fields of a request (tools, tool_choice,
 * response_format; empty ones left out), and `errors` (field name -> message with the position).
 */
export function validateJson(raw) {
  const read = {};
  const errors = {};
  for (const { name, label, problem } of JSON_FIELDS) {
    const text = raw[name] ?? "";
    if (text.trim() === "") continue;
    const { value, error } = readJson(text);
    const wrong = error !== "" ? error : problem(value);
    if (wrong !== "") errors[name] = `${label}: ${wrong}`;
    else read[name] = value;
  }
  return { values: fields(read, raw.tool_choice ?? ""), errors };
}

function fields({ tools = [], schema }, choice) {
  const values = {};
  if (tools.length > 0) values.tools = tools;
  if (tools.length > 0 && choice !== "") values.tool_choice = choice;
  if (schema !== undefined) values.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return values;
}

function problemOfTools(value) {
  if (!Array.isArray(value)) return "must be a JSON array.";
  const named = ({ type, function: made }) => type === "function" && isObject(made) && typeof made.name === "string" && made.name !== "";
  const wrong = value.findIndex((tool) => !isObject(tool) || !named(tool));
  return wrong === -1 ? "" : `entry ${wrong + 1} is not {"type": "function", "function": {"name": …}}.`;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
