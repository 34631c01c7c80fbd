/** A request as a line for a shell. The key is named, never written. */

import { address, apiKey } from "./api.js";

export function curlOf(path, body) {
  const parts = ["curl -N", quoted(address(path)), "-H 'content-type: application/json'"];
  if (apiKey()) parts.push('-H "authorization: Bearer $TANDEM_API_KEY"');
  return [...parts, `-d ${quoted(JSON.stringify(body))}`].join(" \\\n  ");
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
