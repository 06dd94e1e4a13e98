/** The settings that hold JSON: tools, and the schema that answers fit. */

import { readJson } from "/static/jsontext.js";

export const JSON_FIELDS = [
  { name: "tools", label: "Tools", problem: problemOfTools },
  { name: "schema", label: "Answer schema", problem: (value) => (isObject(value) ? "" : "a schema is an object in braces.") },
];

/**
 * `raw`: field name -> text, with that of `tool_choice`. Returns `values`, fields of a request (tools, tool_choice,
 * response_format; empty ones left out), and `errors` (field name -> words that say where).
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
  if (!Array.isArray(value)) return "this is a list in square brackets.";
  const named = ({ type, function: made }) => type === "function" && isObject(made) && typeof made.name === "string" && made.name !== "";
  const wrong = value.findIndex((tool) => !isObject(tool) || !named(tool));
  return wrong === -1 ? "" : `entry ${wrong + 1} is not {"type": "function", "function": {"name": …}}.`;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
