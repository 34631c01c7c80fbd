/** Talks to the gateway that served the page, with the tab's API key. Errors come as words a person can act on. */

const KEY = "tandem.key";

/** What went wrong. `status`: of HTTP, 0 when there was no answer. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** The key is kept for this tab only. */
export function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

/** Ties an input to the key. @param {HTMLInputElement} input @param {() => void} changed */
export function bindKey(input, changed) {
  input.value = apiKey();
  input.addEventListener("change", () => {
    sessionStorage.setItem(KEY, input.value.trim());
    changed();
  });
}

/** Where `path` is, also behind a proxy that serves us under a prefix. */
export function address(path) {
  return new URL(path, document.baseURI).href;
}

/**
 * @param {string} path
 * @param {RequestInit} [options]
 * @returns {Promise<Response>} with a status below 400
 * @throws {ApiError}
 */
export async function call(path, options = {}) {
  const headers = new Headers(options.headers);
  if (apiKey()) headers.set("authorization", `Bearer ${apiKey()}`);
  let response;
  try {
    response = await fetch(address(path), { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The gateway cannot be reached. Is it running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** The JSON at `path`; throws ApiError. */
export async function read(path) {
  const response = await call(path);
  return response.json();
}

/** An error object of either dialect, in words. */
export function wordsOf(error) {
  const words = typeof error === "string" ? error : error?.message;
  return words || "The server reported an error without saying which.";
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  const words = body?.error ? wordsOf(body.error) : `The server answered ${response.status} ${response.statusText}`.trim();
  const wait = response.headers.get("retry-after");
  const again = wait && response.status !== 401 ? ` Try again in ${wait} s.` : "";
  const hint = response.status === 401 ? " Enter an API key at the top of the page." : "";
  return new ApiError(`${sentence(words)}${again}${hint}`, response.status);
}

function sentence(words) {
  const begun = words.charAt(0).toUpperCase() + words.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}
