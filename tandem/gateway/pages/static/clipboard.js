/** Copies text, and buttons that do so. */

import { el } from "./dom.js";

const TOLD_MS = 2000;

/** Put `text` on the clipboard; whether that worked. NOTE: browsers offer the newer way only over HTTPS or on this machine. */
export async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const field = el("textarea", { class: "hidden" });
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  return isCopied;
}

/**
 * @param {string} what is copied, for those who cannot see where the button is
 * @param {() => string} text read when the button is pressed
 */
export function copyButton(what, text) {
  const button = el("button", { type: "button", class: "copy", "aria-label": `Copy ${what}` }, "Copy");
  button.addEventListener("click", async () => {
    const isCopied = await copied(text());
    button.textContent = isCopied ? "Copied" : "Not allowed";
    setTimeout(() => (button.textContent = "Copy"), TOLD_MS);
  });
  return button;
}
