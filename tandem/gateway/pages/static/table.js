/** A table that is sorted by its headers and refreshed in place: a row keeps its element while its thing lives. */

import { el } from "./dom.js";

/**
 * @template T
 * @typedef {{title: string, cell: (row: T) => Node | string | number, sort?: (row: T) => number | string,
 *   isNumber?: boolean, isWide?: boolean, isLong?: boolean}} Column
 */

export class LiveTable {
  /**
   * @param {Column<any>[]} columns
   * @param {{key: (row: any) => string, empty: string, tone?: (row: any) => string, sortBy?: number, few?: number}} options
   *   `few`: rows that are shown before somebody asks for all; on a phone, where a row is a card, a third of them
   */
  constructor(columns, { key, empty, tone = () => "", sortBy = -1, few = 10 }) {
    this.few = matchMedia("(max-width: 720px)").matches ? Math.ceil(few / 3) : few;
    Object.assign(this, { columns, key, tone, sortBy, isDown: false, isWhole: false, rows: [], shown: new Map() });
    this.heads = columns.map((column, index) => this.head(column, index));
    this.body = el("tbody", {});
    this.none = el("p", { class: "none muted" }, empty);
    this.table = el("table", { class: "live" }, el("thead", {}, el("tr", {}, ...this.heads)), this.body);
    this.more = el("button", { type: "button", class: "more", on: { click: () => this.setWhole(!this.isWhole) } });
    this.node = el("div", {}, this.table, this.none, this.more);
  }

  /** @param {any[]} rows */
  show(rows) {
    this.rows = rows;
    this.none.hidden = rows.length > 0;
    this.table.hidden = rows.length === 0;
    this.more.hidden = rows.length <= this.few;
    this.more.textContent = this.isWhole ? `Show ${this.few}` : `Show all ${rows.length}`;
    const before = this.shown;
    this.shown = new Map(this.sorted().slice(0, this.isWhole ? undefined : this.few).map((row) => [this.key(row), row]));
    const nodes = [...this.shown].map(([key, row]) => this.fill(before.get(key)?.node ?? el("tr", {}), row, key));
    if (nodes.some((node, index) => this.body.children[index] !== node)) this.body.replaceChildren(...nodes);
    while (this.body.children.length > nodes.length) this.body.lastChild.remove();
  }

  /** One row's cells; those that show the same as before are left alone. */
  fill(node, row, key) {
    node.className = this.tone(row);
    const cells = this.columns.map((column) => {
      const classes = [column.isNumber && "number", column.isWide && "wide", column.isLong && "long"].filter(Boolean).join(" ");
      return el("td", { class: classes || null, "data-title": column.title }, column.cell(row));
    });
    cells.forEach((cell, index) => {
      const old = node.children[index];
      if (!old) node.append(cell);
      else if (!old.isEqualNode(cell)) old.replaceWith(cell);
    });
    this.shown.set(key, { node });
    return node;
  }

  setWhole(isWhole) {
    this.isWhole = isWhole;
    this.show(this.rows);
  }

  sorted() {
    const by = this.columns[this.sortBy]?.sort;
    if (!by) return this.rows;
    const sign = this.isDown ? -1 : 1;
    return [...this.rows].sort((a, b) => sign * compare(by(a), by(b)));
  }

  head(column, index) {
    const words = column.sort
      ? el("button", { type: "button", class: "sort", on: { click: () => this.sortOn(index) } }, column.title)
      : column.title;
    return el("th", { scope: "col", class: column.isNumber && "number", "aria-sort": index === this.sortBy ? "ascending" : null }, words);
  }

  sortOn(index) {
    this.isDown = index === this.sortBy ? !this.isDown : Boolean(this.columns[index].isNumber);
    this.sortBy = index;
    this.heads.forEach((head, other) => {
      if (other === index) head.setAttribute("aria-sort", this.isDown ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    this.show(this.rows);
  }
}

function compare(a, b) {
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}
