/** Requests that load, unload and delete models. They reject with ApiError. */

import { request } from "/static/api.js";

/** Loads a model; resolves once it is loaded. */
export const loadModel = (id, key) => request("/api/generate", { key, body: { model: id, stream: false } });

/** Unloads a model as soon as no request uses it. */
export const unloadModel = (id, key) => request("/api/generate", { key, body: { model: id, stream: false, keep_alive: 0 } });

/** Deletes a pulled model, and its files unless another model uses them. */
export const deleteModel = (id, key) => request("/api/delete", { key, method: "DELETE", body: { model: id } });
