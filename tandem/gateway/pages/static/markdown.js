/** A little Markdown, built as DOM nodes: paragraphs, headings, lists, fenced and inline code, bold, italics. */

import { el } from "./dom.js";

/** @typedef {{kind: "code" | "list" | "heading" | "paragraph", source: string, isOrdered?: boolean}} Block */

const FENCE = /^ {0,3}```/;
const HEADING = /^#{1,6} +/;
const BULLET = /^ *(?:[-*+]|\d{1,9}[.)]) +/;
const INLINE = /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?)\*\*|\*(?=[^\s*])([^*\n]*[^\s*])\*(?!\*)/gs;

/** Shows growing text in `node`, touching only the blocks that changed. */
export class MarkdownView {
  /** @param {HTMLElement} node */
  constructor(node) {
    this.node = node;
    this.sources = [];
  }

  /** @param {string} text */
  show(text) {
    const blocks = split(text);
    while (this.node.childNodes.length > blocks.length) this.node.lastChild.remove();
    blocks.forEach((block, index) => {
      const source = `${block.kind}\n${block.source}`;
      const old = this.node.childNodes[index];
      if (!old) this.node.append(render(block));
      else if (this.sources[index] !== source) old.replaceWith(render(block));
      this.sources[index] = source;
    });
    this.sources.length = blocks.length;
  }
}

/** @param {string} text @returns {Block[]} */
export function split(text) {
  /** @type {Block[]} */
  const blocks = [];
  const lines = text.split(/\r?\n/);
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) at += 1;
    else {
      const end = endOf(lines, at);
      blocks.push(blockOf(lines.slice(at, end)));
      at = end;
    }
  }
  return blocks;
}

/** Where the block that begins at `at` ends. */
function endOf(lines, at) {
  if (FENCE.test(lines[at])) {
    const close = lines.findIndex((line, index) => index > at && FENCE.test(line));
    return close < 0 ? lines.length : close + 1;
  }
  if (HEADING.test(lines[at])) return at + 1;
  const isList = BULLET.test(lines[at]);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !FENCE.test(lines[end]) && !HEADING.test(lines[end])) {
    if (!isList && BULLET.test(lines[end])) break;
    end += 1;
  }
  return end;
}

function blockOf(lines) {
  if (FENCE.test(lines[0])) {
    const isClosed = lines.length > 1 && FENCE.test(lines.at(-1));
    return { kind: "code", source: lines.slice(1, isClosed ? -1 : undefined).join("\n") };
  }
  const source = lines.join("\n");
  if (HEADING.test(source)) return { kind: "heading", source: source.replace(HEADING, "") };
  if (BULLET.test(source)) return { kind: "list", source, isOrdered: /^ *\d/.test(source) };
  return { kind: "paragraph", source };
}

/** @param {Block} block */
function render(block) {
  if (block.kind === "code") return el("pre", { tabindex: 0 }, el("code", {}, block.source));
  if (block.kind === "heading") return el("h3", {}, ...inline(block.source));
  if (block.kind === "paragraph") return el("p", {}, ...inline(block.source));
  const first = block.isOrdered ? { start: parseInt(block.source, 10) } : {};
  return el(block.isOrdered ? "ol" : "ul", first, ...items(block.source).map((item) => el("li", {}, ...inline(item))));
}

/** A list's items; a line without a bullet belongs to the item before. */
function items(source) {
  const found = [];
  for (const line of source.split("\n")) {
    if (BULLET.test(line)) found.push(line.replace(BULLET, ""));
    else found[found.length - 1] += `\n${line.trim()}`;
  }
  return found;
}

function inline(text) {
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, , code, bold, italic] = match;
    nodes.push(text.slice(at, match.index));
    if (code !== undefined) nodes.push(el("code", {}, code));
    else nodes.push(el(bold === undefined ? "em" : "strong", {}, bold ?? italic));
    at = match.index + whole.length;
  }
  return [...nodes, text.slice(at)];
}
