/** Markdown as DOM nodes: markdown-it finds the tokens, and here each becomes an element or a text node, never markup. */

import { copyButton } from "./clipboard.js";
import { el } from "./dom.js";
import MarkdownIt from "./markdown-it.js";

/** @typedef {{type: string, tag: string, nesting: number, level: number, hidden: boolean, content: string, info: string,
 *   map: [number, number] | null, children: Token[] | null, attrGet: (name: string) => string | null}} Token */

const SCHEMES = ["http:", "https:", "mailto:"];
const TOP_HEADING = 2; // headings of an answer stand below those of the page

const parser = new MarkdownIt({ html: false, linkify: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });

/** Shows growing text in `node`, replacing only the blocks that changed. */
export class MarkdownView {
  /** @param {HTMLElement} node */
  constructor(node) {
    this.node = node;
    this.sources = [];
  }

  /** @param {string} text */
  show(text) {
    const context = {};
    const lines = text.split("\n");
    const blocks = topBlocks(parser.parse(text, context));
    const references = JSON.stringify(context.references ?? {}); // a new or longer one changes earlier words' links
    while (this.node.childNodes.length > blocks.length) this.node.lastChild.remove();
    blocks.forEach((tokens, index) => {
      const [begin, end] = tokens[0].map;
      const source = `${references} ${lines.slice(begin, end).join("\n")}`;
      const old = this.node.childNodes[index];
      if (!old) this.node.append(built(tokens));
      else if (this.sources[index] !== source) old.replaceWith(built(tokens));
      this.sources[index] = source;
    });
    this.sources.length = blocks.length;
  }
}

/** @param {Token[]} tokens @returns {Token[][]} one list for each block that is in no other */
function topBlocks(tokens) {
  const blocks = [];
  for (const token of tokens) {
    if (token.level === 0 && token.nesting >= 0) blocks.push([token]);
    else blocks.at(-1).push(token);
  }
  return blocks;
}

/** @param {Token[]} tokens @returns {DocumentFragment} */
function built(tokens) {
  const root = document.createDocumentFragment();
  const open = [root];
  for (const token of tokens) {
    if (token.nesting < 0) open.pop();
    else {
      const { node, inner = node } = made(token, open.at(-1));
      if (node !== open.at(-1)) open.at(-1).append(node);
      if (token.nesting > 0) open.push(inner);
    }
  }
  return root;
}

/** The token's node, and what its content goes into where that is another. */
function made(token, parent) {
  const make = MAKERS[token.type];
  if (make) return make(token, parent);
  return { node: token.nesting > 0 || token.type === "hr" ? el(token.tag) : words(token.content) };
}

const words = (text) => document.createTextNode(text);

const MAKERS = {
  inline: (token) => ({ node: built(token.children) }),
  paragraph_open: (token, parent) => ({ node: token.hidden ? parent : el("p") }),
  heading_open: (token) => ({ node: el(`h${Math.min(6, Number(token.tag[1]) + TOP_HEADING)}`) }),
  ordered_list_open: (token) => ({ node: el("ol", { start: token.attrGet("start") }) }),
  table_open: () => {
    const inner = el("table");
    return { node: el("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" }, inner), inner };
  },
  th_open: cell,
  td_open: cell,
  fence: code,
  code_block: code,
  code_inline: (token) => ({ node: el("code", {}, token.content) }),
  softbreak: () => ({ node: el("br") }),
  hardbreak: () => ({ node: el("br") }),
  link_open: (token) => ({ node: link(token.attrGet("href")) }),
  image: (token) => ({ node: picture(token) }),
};

function cell(token) {
  const side = /text-align:(\w+)/.exec(token.attrGet("style") ?? "")?.[1];
  return { node: el(token.tag, { class: side && `to-${side}` }) };
}

function code(token) {
  const text = token.content.replace(/\n$/, "");
  const language = token.info.trim().split(/\s+/)[0];
  return {
    node: el("figure", { class: "code" },
      el("figcaption", {}, el("span", {}, language || "code"), copyButton(language ? `the ${language} code` : "the code", () => text)),
      el("pre", { tabindex: 0 }, el("code", {}, text))),
  };
}

/** A link that opens elsewhere; an address that is not of the web is only shown. @param {string | null} address */
function link(address) {
  const target = allowed(address);
  if (!target) return el("span", { class: "unlinked", title: `Not opened: ${address}` });
  return el("a", { href: target, target: "_blank", rel: "noopener noreferrer", title: target });
}

/** NOTE: named and never loaded, since a model could send what it knows in a picture's address. */
function picture(token) {
  const node = link(token.attrGet("src"));
  node.append(token.children.length ? built(token.children) : "picture");
  return node;
}

function allowed(address) {
  const parsed = address && URL.canParse(address) ? new URL(address) : null;
  return parsed && SCHEMES.includes(parsed.protocol) ? parsed.href : null;
}
