/** An error in a box: in words, then the server's message, and the id of the request. */

import { ApiError } from "/static/api.js";
import { element } from "/static/dom.js";

export function errorBox(error) {
  const known = error instanceof ApiError;
  const box = element("div", { class: "error", role: "alert" });
  box.append(element("p", { text: known ? error.message : "An error occurred in this page." }));
  const detail = known ? error.detail : String(error);
  if (detail !== "") box.append(element("p", { class: "said", text: detail }));
  if (known && error.requestId !== "") {
    box.append(element("p", { class: "note", text: "Request " }, element("code", { text: error.requestId })));
  }
  return box;
}
