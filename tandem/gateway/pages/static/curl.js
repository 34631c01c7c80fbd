/** A request as a line for a shell, and how it gets there. The key is named, never written. */

import { address, apiKey } from "./api.js";
import { el } from "./dom.js";

export function curlOf(path, body) {
  const parts = ["curl -N", quoted(address(path)), "-H 'content-type: application/json'"];
  if (apiKey()) parts.push('-H "authorization: Bearer $TANDEM_API_KEY"');
  return [...parts, `-d ${quoted(JSON.stringify(body))}`].join(" \\\n  ");
}

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

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
