/** A field in place of a message: Enter sends what it holds, Escape leaves the message as it was. */

import { el } from "./dom.js";

/** @param {string} text @param {(text: string) => void} send @param {() => void} leave @returns {HTMLElement} */
export function editor(text, send, leave) {
  const field = el("textarea", { rows: 3, "aria-label": "Edit the message" });
  field.value = text;
  const finish = () => field.value.trim() && send(field.value.trim());
  field.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Escape") leave();
    if (event.key !== "Enter" || event.shiftKey) return;
    event.preventDefault();
    finish();
  });
  return el("div", { class: "editor" }, field, el("p", { class: "muted" }, "The turns after this message are removed."),
    el("div", { class: "deeds" },
      el("button", { type: "button", on: { click: leave } }, "Cancel"),
      el("button", { type: "button", class: "primary", on: { click: finish } }, "Send")));
}
